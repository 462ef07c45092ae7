"""A decoder on a device: weights, cache, buffers, and the compiled steps over them.

    model = DecoderModel(config, weights, ...)
    a = model.cache.allocate_sequence(prompt)
    model.prefill([a], [prompt[model.cache.length(a):]])       # logits of the token after each sequence
    model.decode([a], [token])

Steps are compiled for a few sizes (buckets); a step takes the smallest that holds it, whose other entries are inert.
Which sequences run, and when, is the scheduler's matter (`cki.engine.scheduler`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cki.device import DeviceInfo
from cki.dtypes import DType
from cki.engine.config import ModelConfig
from cki.engine.device_memory import DeviceTensors
from cki.engine.device_weights import DeviceWeights
from cki.engine.program import StepProgram, Workspace
from cki.engine.step_plan import CacheGeometry, DecoderPlanner, StepShape
from cki.memory import PagedKVCache
from cki.memory.views import CacheTensor


class ModelLimits(NamedTuple):
    """max_sequences: at a time.  max_step_tokens: new tokens of a prefill step.  max_length: tokens of a sequence."""

    max_sequences: int
    max_step_tokens: int
    max_length: int


def bucket(count: int, largest: int) -> int:
    """The size of a compiled step for `count` tokens or sequences: powers of two, above 64 four steps an octave."""
    step = 1 << max((count - 1).bit_length() - (3 if count > 64 else 0), 0)
    return min(-(-count // step) * step, largest)


class DecoderModel:
    """A model's weights and cache on one device, and its compiled steps.  Belongs to one thread at a time.

    weights: Hugging Face's names to NumPy arrays.  dtype: of weights, activations and cache.
    num_blocks, block_size: of the cache.
    """

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, np.ndarray], *, dtype: DType, device: DeviceInfo,
        num_blocks: int, block_size: int, limits: ModelLimits, stream: int = 0,
    ) -> None:  # fmt: skip
        self.config, self.dtype, self.device, self.limits = config, dtype, device, limits
        self.stream = stream
        columns = min(-(-limits.max_length // block_size), num_blocks)
        place = "sim" if device.kind == "sim" else device.index
        self.cache = PagedKVCache(
            config.num_layers, num_blocks, block_size=block_size, num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim, dtype=dtype.name, max_sequences=limits.max_sequences,
            max_blocks_per_sequence=columns, max_step_tokens=max(limits.max_step_tokens, limits.max_sequences),
            device=place, stream=stream,
        )  # fmt: skip
        self._weights = DeviceWeights(config, weights, dtype, device, limits.max_length)
        geometry = CacheGeometry(num_blocks, block_size, columns)
        self._planner = DecoderPlanner(config, dtype, geometry, limits.max_length)
        largest = StepShape(
            max(limits.max_step_tokens, limits.max_sequences), limits.max_sequences, decode=False
        )
        self._buffers = DeviceTensors(
            device, [(name, *spec) for name, spec in self._planner.buffers(largest).items()]
        )
        self._workspace = Workspace(device)
        self._programs: dict[StepShape, StepProgram] = {}

    @property
    def weight_nbytes(self) -> int:
        """Bytes of the weights on the device."""
        return self._weights.nbytes

    def prefill(self, sequences: Sequence[int], tokens: Sequence[Sequence[int]]) -> CacheTensor:
        """Store new tokens of sequences of the cache, any number each; logits of what follows each sequence.

        The tables of the cache are advanced (`PagedKVCache.prepare_step`), with its errors and before anything has
        changed.  Returns logits [.., vocab_size] on the device, of which the first rows are the sequences'.
        """
        counts = np.array([len(part) for part in tokens], np.int64)
        total = int(counts.sum())
        shape = StepShape(
            bucket(total, self.limits.max_step_tokens), bucket(len(counts), self.limits.max_sequences), False,
            _longest_bucket(int(counts.max())),
        )  # fmt: skip
        self.cache.prepare_step(sequences, counts)
        self._buffers.write(
            "tokens", np.concatenate([np.asarray(part, np.int32) for part in tokens]), self.stream
        )
        self._buffers.write("last_rows", np.cumsum(counts) - 1, self.stream)
        return self._run(shape)

    def decode(self, sequences: Sequence[int], tokens: Sequence[int]) -> CacheTensor:
        """Store one new token of each sequence; logits as of `prefill`."""
        size = bucket(len(sequences), self.limits.max_sequences)
        self.cache.prepare_step(sequences)
        self._buffers.write("tokens", np.asarray(tokens, np.int32), self.stream)
        return self._run(StepShape(size, size, True))

    def _run(self, shape: StepShape) -> CacheTensor:
        self.program(shape).launch(self.stream)
        return self._buffers["logits"]

    def program(self, shape: StepShape) -> StepProgram:
        """The compiled step of a shape."""
        program = self._programs.get(shape)
        if program is None:
            plan = self._planner.plan(shape, self.device)
            memory = dict(self._buffers.items()) | dict(self._weights.items()) | self._cache_tensors()
            program = StepProgram(plan, self.device, memory | self._workspace.take(plan))
            self._programs[shape] = program
        return program

    def _cache_tensors(self) -> dict[str, CacheTensor]:
        tensors = {
            name: self.cache.table(name)
            for name in ("slot_mapping", "positions", "cu_seqlens_q", "seq_lens", "block_table")
        }
        for number in range(self.config.num_layers):
            layer = self.cache.layer(number)
            tensors |= {f"layers.{number}.k_cache": layer.k, f"layers.{number}.v_cache": layer.v}
        return tensors


def _longest_bucket(longest: int) -> int:
    """Tiles are chosen for it: a few values are enough."""
    return min(1 << (longest - 1).bit_length(), 128)
