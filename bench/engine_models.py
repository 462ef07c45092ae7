"""Models for `bench/engine.py`: shapes of real ones with random weights made on the device, and their kernels compiled
ahead by many processes at once.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from cki import cache, dtypes
from cki.device import DeviceInfo
from cki.dtypes import DType
from cki.engine import ModelConfig
from cki.engine.device_weights import DeviceWeights
from cki.engine.model import DecoderModel, ModelLimits
from cki.engine.step_plan import CacheGeometry, DecoderPlanner, StepShape
from cki.kernel import KernelSpec
from cki.memory.views import CacheTensor

QWEN3_8B = {
    "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "max_position_embeddings": 40960, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "eos_token_id": 151645,
}  # fmt: skip
SMOLLM2_135M = {
    "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "intermediate_size": 1536, "vocab_size": 49152,
    "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "eos_token_id": 2,
}  # fmt: skip
SHAPES = {"qwen3-8b": QWEN3_8B, "smollm2": SMOLLM2_135M}
#: Options of `DecoderPlanner` by name.
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {}, "plain": {"way": "plain"}, "decode": {"way": "decode"},
    "fp8": {"fp8": True}, "fp8_decode": {"fp8": True, "way": "decode"},
    "fp8_plain": {"fp8": True, "way": "plain"},
    "fp8_kv": {"fp8": True, "kv_codes": True},
}  # fmt: skip
#: Standard deviation of random codes.
_CODE_SPREAD = 64.0
#: Tokens of the longest sequence: the engine's own default, so tables are as wide as a user's.
MAX_LENGTH = 8192
MAX_SEQUENCES = 64
BLOCK_SIZE = 16


def config_of(name: str, layers: int | None = None) -> ModelConfig:
    """A model's configuration, with fewer layers where that is asked for."""
    shape = SHAPES[name]
    return ModelConfig.from_hf({**shape, "num_hidden_layers": layers or shape["num_hidden_layers"]})


def as_torch(tensor: Any) -> Any:
    """A tensor of the engine's as one of torch's on the same memory."""
    import torch

    if tensor.dtype != dtypes.e4m3:
        return torch.from_dlpack(tensor)
    if tensor.view.device.kind == "cpu":
        return torch.from_numpy(tensor.numpy().view(np.uint8)).view(torch.float8_e4m3fn)
    return torch.as_tensor(_Bytes(tensor), device="cuda").view(torch.float8_e4m3fn)


class _Bytes:
    """Codes as bytes, for frameworks that exchange no e4m3."""

    def __init__(self, tensor: CacheTensor) -> None:
        self._tensor = tensor  # keeps the memory
        self.__cuda_array_interface__ = {
            "shape": tensor.shape, "typestr": "|u1", "data": (tensor.ptr, False), "version": 3,
        }  # fmt: skip


def fill_at_random(role: str, tensor: CacheTensor) -> None:
    """Weights of a size that keeps activations near 1: norms' around 1, biases' small."""
    import torch

    values = as_torch(tensor)
    if role.endswith(".scales"):
        values.fill_((128 * values.shape[1]) ** -0.5 / _CODE_SPREAD)
    elif tensor.dtype == dtypes.e4m3:
        for rows in values.split(1024):
            rows.copy_((_CODE_SPREAD * torch.randn(rows.shape, device=rows.device)).clamp_(-448, 448))
    elif values.ndim == 1:
        values.normal_(1.0 if "norm" in role else 0.0, 0.1)
    else:
        values.normal_(0.0, 1.0 if role == "embed" else values.shape[-1] ** -0.5)


def make_model(
    config: ModelConfig, device: DeviceInfo, *, context: int, sequences: int, dtype: DType = dtypes.bf16,
    **variant: Any,
) -> DecoderModel:  # fmt: skip
    """Random weights, and a cache of random keys and values that holds so many sequences of `context` tokens."""
    import torch

    torch.manual_seed(0)
    limits = ModelLimits(MAX_SEQUENCES, 2048, MAX_LENGTH)
    weights = DeviceWeights(config, fill_at_random, dtype, device, MAX_LENGTH, fp8=variant.pop("fp8", False))
    blocks = sequences * (-(-context // BLOCK_SIZE) + 1)
    block = BLOCK_SIZE * token_bytes(config, dtype, codes=variant.get("kv_codes", False))
    nbytes = max(blocks, MAX_LENGTH // BLOCK_SIZE) * block
    model = DecoderModel(
        config, weights, device=device, limits=limits, block_size=BLOCK_SIZE, cache_nbytes=nbytes, **variant
    )
    for number in range(config.num_layers):
        layer = model.cache.layer(number)
        for tensor, scale in ((layer.k, layer.k_scale), (layer.v, layer.v_scale)):
            if scale is None:
                as_torch(tensor).normal_()
            else:
                fill_at_random("codes", tensor)
                as_torch(scale).fill_(1 / _CODE_SPREAD)
    synchronize(device)
    return model


def token_bytes(config: ModelConfig, dtype: DType, *, codes: bool) -> int:
    """Of keys and values of a token in all layers; codes have a scale a head."""
    of_head = config.head_dim + 4 if codes else config.head_dim * dtype.itemsize
    return 2 * config.num_layers * config.num_kv_heads * of_head


def sequences_of(model: DecoderModel, count: int, context: int) -> list[int]:
    """Sequences of `context` tokens, whose keys and values are what the cache's blocks hold, and with room for as many
    more as there is."""
    room = model.cache.blocks_free // count * BLOCK_SIZE
    assert room > context
    ids = [model.cache.allocate_sequence(min(room, model.limits.max_length)) for _ in range(count)]
    for sequence in ids:
        for first in range(0, context, model.limits.max_step_tokens):
            model.cache.prepare_step([sequence], min(context - first, model.limits.max_step_tokens))
    return ids


def synchronize(device: DeviceInfo) -> None:
    """Wait for everything on a GPU."""
    if device.kind == "cuda":
        import torch

        torch.cuda.synchronize()


def step_kernels(
    config: ModelConfig,
    batches: Sequence[int],
    device: DeviceInfo,
    dtype: DType = dtypes.bf16,
    **variant: Any,
) -> list[KernelSpec]:
    """The kernels of decode steps, those of each batch behind those of the one before."""
    geometry = CacheGeometry(MAX_LENGTH // BLOCK_SIZE, BLOCK_SIZE, MAX_LENGTH // BLOCK_SIZE)
    planner = DecoderPlanner(config, dtype, geometry, MAX_LENGTH, MAX_SEQUENCES, **variant)
    plans = [planner.plan(StepShape(batch, batch, True), device) for batch in batches]
    return list(dict.fromkeys(step.kernel for plan in plans for step in plan.steps))


def compile_ahead(kernels: Sequence[KernelSpec], arch: str) -> float:
    """Bring kernels into the cache directory, each compiled by a process of its own; returns the seconds taken.

    To be called before this process uses a GPU: it forks.
    """
    start = time.perf_counter()
    wanted = list(dict.fromkeys(kernels))[::-1]  # a step's last, sampling, takes longest
    workers = min(len(wanted), len(os.sched_getaffinity(0)))
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        pool.starmap(_compile, [(kernel, arch) for kernel in wanted], chunksize=1)
    return time.perf_counter() - start


def _compile(kernel: KernelSpec, arch: str) -> None:
    cache.get(kernel, arch)
