"""A decoder on a device: weights, cache, buffers, and the compiled steps over them.

    model = DecoderModel(config, weights, device=device, limits=ModelLimits(64, 2048, 8192))
    a = model.cache.allocate_sequence(prompt)
    result = model.prefill([StepRow(a, prompt)])          # the prompt's keys and values, and the token after it
    result = model.decode([StepRow(a, result.wait().tokens[:1])])

Steps are compiled for a few sizes (buckets); a step takes the smallest that holds it, whose other entries are inert.
Which sequences run, and when, is the scheduler's matter (`cki.engine.scheduler`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cki.device import DeviceInfo
from cki.engine.config import ModelConfig
from cki.engine.device_memory import DeviceTensors, Readback, StagedTensors, free_bytes, new_stream
from cki.engine.device_weights import HasView, ModelWeights
from cki.engine.products import Way
from cki.engine.program import StepProgram, Workspace
from cki.engine.step_plan import MAX_ENDS, SAMPLING, CacheGeometry, DecoderPlanner, StepShape
from cki.errors import InvalidArgumentError
from cki.memory import PagedKVCache
from cki.memory.views import CacheTensor
from cki.plan import Plan

_UPLOADED = ("given", "tokens", "last_rows", "cu_seqlens_k")
_OF_REQUESTS = (*SAMPLING, "ends", "limits")
_UNLIMITED = 2**31 - 1
#: Of a GPU's free memory, what the cache leaves for temporary tensors of steps.
_LEFT_FREE = 0.1


class ModelLimits(NamedTuple):
    """max_sequences: at a time.  max_step_tokens: new tokens of a prefill step.  max_length: tokens of a sequence.

    max_step_keys: tokens, stored and new, of all sequences of a prefill step; max_length or more.
    """

    max_sequences: int
    max_step_tokens: int
    max_length: int
    max_step_keys: int = _UNLIMITED


class RowSampling(NamedTuple):
    """How a sequence's next token is chosen, as `cki.ops.sampling.sample_tokens` takes it.

    seen_rows: the row of remembered tokens, -1 for none.  alternatives: how many likeliest tokens are reported.
    ends, limits: tokens after which, and the length at which, a chained step leaves the sequence alone; at most
        MAX_ENDS tokens count.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    seen_rows: int = -1
    alternatives: int = 0
    ends: tuple[int, ...] = ()
    limits: int = _UNLIMITED


GREEDY = RowSampling()


class StepRow(NamedTuple):
    """A sequence's part of a step.  sequence: of the cache.  tokens: the new ones."""

    sequence: int
    tokens: Sequence[int] | np.ndarray
    sampling: RowSampling = GREEDY


class StepTokens(NamedTuple):
    """What a step chose, in the order of its rows: tokens and logprobs [rows].

    top_tokens, top_logprobs: [rows, ..], filled as far as a row's `alternatives`; None where no row has any.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    top_tokens: np.ndarray | None
    top_logprobs: np.ndarray | None


class StepResult:
    """A step under way."""

    def __init__(self, readback: Readback, rows: int) -> None:
        self._readback, self._rows = readback, rows

    def wait(self) -> StepTokens:
        """The tokens, once they are there.  Before the second step after this one of its kind."""
        arrays = [array[: self._rows].copy() for array in self._readback.wait()]
        tokens, logprobs, *top = arrays
        return StepTokens(tokens, logprobs, *top) if top else StepTokens(tokens, logprobs, None, None)


def bucket(count: int, largest: int) -> int:
    """The size of a compiled step for `count` tokens or sequences: powers of two, above 64 four steps an octave."""
    step = 1 << max((count - 1).bit_length() - (3 if count > 64 else 0), 0)
    return min(-(-count // step) * step, largest)


def _filled(ends: Sequence[int]) -> list[int]:
    """MAX_ENDS ids; -1 is none."""
    return [*ends[:MAX_ENDS], *(-1,) * (MAX_ENDS - len(ends))]


class DecoderModel:
    """A model's weights and cache on one device, and its compiled steps.  Belongs to one thread at a time.

    weights: on that device (`DeviceWeights`); activations and cache are of their type.  cache_nbytes: of keys and
    values; None takes most of a GPU's free memory, on the simulated device room for two sequences of max_length.
    graphs: decode steps are CUDA graphs.  stream: of all steps; None makes one.  way,
    merge_inside, kv_codes: see `DecoderPlanner`.
    """

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, *, device: DeviceInfo, limits: ModelLimits,
        block_size: int = 16, cache_nbytes: int | None = None, graphs: bool = True,
        stream: int | None = None, way: Way | None = None, merge_inside: bool = True, kv_codes: bool = False,
    ) -> None:  # fmt: skip
        self.config, self.dtype, self.device, self.limits = config, weights.dtype, device, limits
        self.stream = new_stream(device) if stream is None else stream
        self._graphs = graphs
        self.weights = weights
        columns = -(-limits.max_length // block_size)
        self._planner = DecoderPlanner(
            config, self.dtype, CacheGeometry(1, block_size, columns), weights.positions, limits.max_sequences,
            way, merge_inside, weights.fp8, kv_codes,
        )  # fmt: skip
        self._most_tokens = max(limits.max_step_tokens, limits.max_sequences)
        self._make_buffers()
        self.cache = self._make_cache(block_size, columns, cache_nbytes)
        self.limits = limits._replace(max_length=min(limits.max_length, self.cache.num_blocks * block_size))
        if kv_codes:
            self.limits = self.limits._replace(max_step_keys=columns * block_size)
        geometry = CacheGeometry(self.cache.num_blocks, block_size, columns)
        self._planner = replace(self._planner, cache=geometry)
        self._workspace = Workspace(device)
        self._programs: dict[StepShape, StepProgram] = {}
        self._readbacks: dict[tuple[bool, bool, bool], Readback] = {}
        self._turn = {True: False, False: False}
        self._sent_sampling: tuple[RowSampling, ...] = ()

    def _make_buffers(self) -> None:
        largest = StepShape(self._most_tokens, self.limits.max_sequences, decode=False)
        specs = {name: (name, *spec) for name, spec in self._planner.buffers(largest).items()}
        self._inputs = StagedTensors(self.device, [specs.pop(name) for name in _UPLOADED if name in specs])
        self._sampling = StagedTensors(self.device, [specs.pop(name) for name in _OF_REQUESTS])
        self._buffers = DeviceTensors(self.device, list(specs.values()))
        self._buffers.write("counters", np.zeros(self._buffers["counters"].shape))
        self._buffers.finish()

    def _make_cache(self, block_size: int, columns: int, nbytes: int | None) -> PagedKVCache:
        c = self.config
        codes = self._planner.kv_codes
        of_head = c.head_dim + 4 if codes else c.head_dim * self.dtype.itemsize
        block = 2 * c.num_layers * block_size * c.num_kv_heads * of_head
        if nbytes is None and self.device.kind == "cuda":
            nbytes = int(free_bytes(self.device) * (1 - _LEFT_FREE))
        # More blocks than all sequences can hold are of no use.
        most = columns * self.limits.max_sequences
        num_blocks = min(2 * columns if nbytes is None else nbytes // block, most)
        if not num_blocks:
            raise InvalidArgumentError(
                f"the cache has {nbytes} bytes, a block of {block_size} tokens takes {block}",
                hint=f"cache_nbytes of {block} or more, on a GPU with that much free memory",
            )
        return PagedKVCache(
            c.num_layers, num_blocks, block_size=block_size, num_kv_heads=c.num_kv_heads, head_dim=c.head_dim,
            dtype="e4m3" if codes else self.dtype.name, max_sequences=self.limits.max_sequences,
            max_blocks_per_sequence=columns,
            max_step_tokens=self._most_tokens, stream=self.stream,
            device="sim" if self.device.kind == "sim" else self.device.index,
        )  # fmt: skip

    @property
    def weight_nbytes(self) -> int:
        """Bytes of the weights on the device."""
        return self.weights.nbytes

    def prefill(self, rows: Sequence[StepRow]) -> StepResult:
        """Store new tokens of sequences of the cache, any number each, and choose what follows each.

        The tables of the cache are advanced (`PagedKVCache.prepare_step`), with its errors and before anything has
        changed.  Does not wait for the device.
        """
        counts = np.array([len(row.tokens) for row in rows], np.int64)
        self.cache.prepare_step([row.sequence for row in rows], counts)
        tokens = np.concatenate([np.asarray(row.tokens, np.int32) for row in rows])
        values = {"given": [1], "tokens": tokens, "last_rows": np.cumsum(counts) - 1}
        if self._planner.kv_codes:
            starts = np.cumsum([0, *(self.cache.length(row.sequence) for row in rows)])
            behind = np.full(self.limits.max_sequences - len(rows), starts[-1])
            values["cu_seqlens_k"] = np.concatenate([starts, behind])
        self._inputs.send(values, self.stream)
        return self._run(self._prefill_shape(counts), rows)

    def decode(self, rows: Sequence[StepRow], *, chained: bool = False) -> StepResult:
        """Store one new token of each sequence and choose what follows; otherwise as `prefill`.

        chained: the last step was a decode step of the same rows, and their new tokens are those it chose.  The device
        takes them, and advances the tables: the host need not know them yet.  Rows that have ended by then (see
        `RowSampling`) store nothing more, and what is chosen for them means nothing.
        """
        sequences = [row.sequence for row in rows]
        if chained:
            self.cache.extend_step(sequences)
        else:
            self.cache.prepare_step(sequences)
            self._inputs.send({"given": [1], "tokens": [row.tokens[0] for row in rows]}, self.stream)
        return self._run(self.decode_shape(len(rows)), rows)

    def relaunch(self, rows: Sequence[StepRow]) -> StepResult:
        """The last decode step once more, on the same tables, by its single launches instead of its graph.

        What a replay does must be what its launches do: for tests and benchmarks.
        """
        self._inputs.send({"given": [1], "tokens": [row.tokens[0] for row in rows]}, self.stream)
        return self._run(self.decode_shape(len(rows)), rows, as_graph=False)

    def warm_up(self, prompt_lengths: Sequence[int]) -> int:
        """Compile the steps that prompts of these lengths take when they begin together, and record their graphs.

        Nothing runs.  Returns the number of steps that are compiled by now.
        """
        self.program(self.decode_shape(min(len(prompt_lengths), self.limits.max_sequences)))
        room, counts = self.limits.max_step_tokens, []
        for length in prompt_lengths[: self.limits.max_sequences]:
            counts.append(min(length, room))
            room -= counts[-1]
            if not room:
                break
        self.program(self._prefill_shape(np.array(counts)))
        return len(self._programs)

    def remember(self, seen_row: int, tokens: Sequence[int]) -> None:
        """Make a row of remembered tokens hold exactly these; the tokens of its sequence are added as they come."""
        words = np.zeros(-(-self.config.vocab_size // 32), np.uint32)
        ids = np.unique(np.asarray(tokens, np.int64))
        np.bitwise_or.at(words, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
        self._buffers.write("seen", words, self.stream, first=seen_row * len(words))

    def logits(self) -> CacheTensor:
        """Logits of the last step's rows, [max_sequences, vocab_size] on the device."""
        return self._buffers["logits"]

    def _prefill_shape(self, counts: np.ndarray) -> StepShape:
        longest = min(1 << (int(counts.max()) - 1).bit_length(), 128)
        tokens = bucket(int(counts.sum()), self._most_tokens)
        return StepShape(tokens, bucket(len(counts), self.limits.max_sequences), False, longest)

    def decode_shape(self, rows: int) -> StepShape:
        """The size of the compiled step for so many sequences."""
        size = bucket(rows, self.limits.max_sequences)
        return StepShape(size, size, True)

    def _run(self, shape: StepShape, rows: Sequence[StepRow], *, as_graph: bool = True) -> StepResult:
        sampling = tuple(row.sampling for row in rows)
        if sampling != self._sent_sampling:
            columns: dict[str, Any] = dict(zip(RowSampling._fields, zip(*sampling)))
            # Rows behind the step's own are greedy and remember nothing.
            columns["seen_rows"] = (*columns["seen_rows"], *(-1,) * (self.limits.max_sequences - len(rows)))
            columns["ends"] = [_filled(ends) for ends in columns["ends"]]
            self._sampling.send(columns, self.stream)
            self._sent_sampling = sampling
        self.program(shape).launch(self.stream, as_graph=as_graph)
        alternatives = any(row.sampling.alternatives for row in rows)
        readback = self._readback(shape.decode, alternatives)
        readback.start(self.stream)
        return StepResult(readback, len(rows))

    def plan(self, shape: StepShape) -> Plan:
        """The launches of a step of a shape."""
        return self._planner.plan(shape, self.device)

    def program(self, shape: StepShape) -> StepProgram:
        """The compiled step of a shape."""
        program = self._programs.get(shape)
        if program is None:
            program = self.compiled(self.plan(shape))
            if shape.decode and self._graphs:
                program.capture()
            self._programs[shape] = program
        return program

    def compiled(self, plan: Plan) -> StepProgram:
        """Any launches over this model's memory: a step's, or some of them for measurements."""
        memory: dict[str, HasView] = {**self._cache_tensors(), **self._workspace.take(plan)}
        for group in (self._inputs, self._sampling, self._buffers, self.weights):
            memory |= dict(group.items())
        return StepProgram(plan, self.device, memory)

    def _cache_tensors(self) -> dict[str, CacheTensor]:
        names = ("slot_mapping", "positions", "cu_seqlens_q", "seq_lens", "block_table")
        tensors = {name: self.cache.table(name) for name in names}
        for number in range(self.config.num_layers):
            layer = self.cache.layer(number)
            tensors |= {f"layers.{number}.k_cache": layer.k, f"layers.{number}.v_cache": layer.v}
            if layer.k_scale is not None and layer.v_scale is not None:
                tensors |= {
                    f"layers.{number}.k_scale": layer.k_scale,
                    f"layers.{number}.v_scale": layer.v_scale,
                }
        return tensors

    def _readback(self, decode: bool, alternatives: bool) -> Readback:
        """Two take turns: a step may be under way before the results of the one before are read."""
        self._turn[decode] = turn = not self._turn[decode]
        key = (decode, alternatives, turn)
        if key not in self._readbacks:
            names = ["sampled", "logprobs", *(("top_tokens", "top_logprobs") if alternatives else ())]
            self._readbacks[key] = Readback(self.device, [self._buffers[name] for name in names])
        return self._readbacks[key]
