"""A decoder's weights in device memory: one copy of each, Q, K and V side by side, gate and up side by side.

A layer's products of one input are one matrix, so a step needs one launch for Q, K and V, and one for gate and up.
Roles are the names under which a step's plan knows the weights; matrices lie as files store them, [out, in].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from cki import dtypes
from cki.device import DeviceInfo
from cki.dtypes import DType
from cki.engine.config import ModelConfig
from cki.engine.device_memory import DeviceTensors
from cki.engine.quantized import BLOCK, QuantizedWeight, quantize_blocks, scales_shape
from cki.engine.rope import cos_sin_table, products_rotate
from cki.memory.views import CacheTensor
from cki.tensor import TensorView

#: Role in a layer -> the weights of Hugging Face's names whose rows it holds, one below the other.
_LAYER_PARTS = {
    "norm1": ("input_layernorm.weight",),
    "wqkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "bqkv": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
    "wo": ("self_attn.o_proj.weight",),
    "bo": ("self_attn.o_proj.bias",),
    "norm2": ("post_attention_layernorm.weight",),
    "wgu": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "bgu": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "wd": ("mlp.down_proj.weight",),
    "bd": ("mlp.down_proj.bias",),
}
_MODEL_PARTS = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight"}

#: Where weights come from: see `DeviceWeights`.
WeightSource = Mapping[str, np.ndarray] | Callable[[str, CacheTensor], None]


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Role -> shape of every weight that the model has; layers' roles are `layers.0.wqkv` and so on."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    rows = (config.num_heads + 2 * config.num_kv_heads) * dim
    layer: dict[str, tuple[int, ...]] = {"norm1": (hidden,), "wqkv": (rows, hidden)}
    if config.attention_bias:
        layer["bqkv"] = (rows,)
    if config.qk_norm:
        layer |= {"q_norm": (dim,), "k_norm": (dim,)}
    layer["wo"] = (hidden, config.num_heads * dim)
    if config.attention_output_bias:
        layer["bo"] = (hidden,)
    layer |= {"norm2": (hidden,), "wgu": (2 * inner, hidden)}
    if config.mlp_bias:
        layer["bgu"] = (2 * inner,)
    layer["wd"] = (hidden, inner)
    if config.mlp_bias:
        layer["bd"] = (hidden,)
    shapes: dict[str, tuple[int, ...]] = {"embed": (config.vocab_size, hidden)}
    for number in range(config.num_layers):
        shapes |= {f"layers.{number}.{role}": shape for role, shape in layer.items()}
    shapes["final_norm"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["head"] = (config.vocab_size, hidden)
    return shapes


#: Matrices of a layer that may be e4m3 codes; the scales of their blocks are the role with ".scales" behind.
_CODED = ("wqkv", "wo", "wgu", "wd")


def weight_specs(
    config: ModelConfig, dtype: DType, *, fp8: bool = False
) -> dict[str, tuple[tuple[int, ...], DType]]:
    """Role -> shape and element type of everything that weights are on the device.  fp8: see `DeviceWeights`."""
    specs: dict[str, tuple[tuple[int, ...], DType]] = {}
    for role, shape in weight_shapes(config).items():
        coded = fp8 and role.rpartition(".")[2] in _CODED
        specs[role] = shape, dtypes.e4m3 if coded else dtype
        if coded:
            specs[f"{role}.scales"] = scales_shape(shape), dtypes.f32
    return specs


def source_names(role: str) -> tuple[str, ...]:
    """Hugging Face's names of the weights that a role is made of, in the order of its rows."""
    if role == "head":
        return ("lm_head.weight",)
    if role in _MODEL_PARTS:
        return (_MODEL_PARTS[role],)
    start, _, part = role.rpartition(".")
    return tuple(f"model.{start}.{name}" for name in _LAYER_PARTS[part])


class HasView(Protocol):
    """A tensor by its address: `CacheTensor`, or what lends one of a framework's."""

    @property
    def view(self) -> TensorView: ...


class ModelWeights(Protocol):
    """Weights as `DecoderModel` takes them.  positions: of the table of cosines and sines (role "cos_sin")."""

    dtype: DType
    nbytes: int
    positions: int
    fp8: bool

    def items(self) -> Sequence[tuple[str, HasView]]:
        """Roles and tensors: those of `weight_shapes`, and "cos_sin" where rotation needs a table."""


class DeviceWeights:
    """All weights of a model on a device, converted to one element type.

    weights: Hugging Face's names to NumPy arrays, read one after the other and not kept; or a function of role and
    tensor that fills the tensor (weights that never were on the host).  positions: as many as the table of cosines and
    sines has, where the model needs one (role "cos_sin").  fp8: layers' matrices become e4m3 codes with scales of
    128 x 128 blocks; codes that a file has are taken as they are where its matrices' rows are whole blocks.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        dtype: DType,
        device: DeviceInfo,
        positions: int,
        *,
        fp8: bool = False,
    ) -> None:
        self.dtype, self.positions, self.fp8 = dtype, positions, fp8
        shapes = weight_shapes(config)
        table = cos_sin_table(config, positions, always=products_rotate(config, dtype, device))
        coded = weight_specs(config, dtype, fp8=fp8)
        specs = [(role, *spec) for role, spec in coded.items()]
        if table is not None:
            specs.append(("cos_sin", table.shape, dtypes.f32))
        self._tensors = DeviceTensors(device, specs)
        self.nbytes = self._tensors.nbytes
        if callable(weights):
            for role in coded:
                weights(role, self._tensors[role])
        else:
            for role in shapes:
                self._place(role, weights, coded=f"{role}.scales" in coded)
        if table is not None:
            self._tensors.write("cos_sin", table)
        self._tensors.finish()

    def _place(self, role: str, weights: Mapping[str, np.ndarray], *, coded: bool) -> None:
        names = source_names(role)
        if coded:
            quantized = _quantized(weights, names)
            self._tensors.write(role, quantized.codes)
            self._tensors.write(f"{role}.scales", quantized.scales)
            return
        first = 0
        for name in names:
            part = weights[name]
            self._tensors.write(role, part, first=first)
            first += part.size
        assert first == self._tensors[role].view.size, role

    def items(self) -> Sequence[tuple[str, HasView]]:
        """Roles and tensors."""
        return self._tensors.items()


def _quantized(weights: Mapping[str, np.ndarray], names: Sequence[str]) -> QuantizedWeight:
    """Codes and scales of matrices one below the other: those given, if the blocks of each begin where one ends."""
    stored = getattr(weights, "quantized", None)
    found = [stored(name) if stored else None for name in names]
    given = [part for part in found if part is not None and (len(part.codes) % BLOCK == 0 or len(names) == 1)]
    if len(given) == len(names):
        return QuantizedWeight(
            np.concatenate([part.codes for part in given]), np.concatenate([part.scales for part in given])
        )
    return quantize_blocks(np.concatenate([np.asarray(weights[name], np.float32) for name in names]))
