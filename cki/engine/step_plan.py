"""One step of a decoder as one plan: embedding, every layer, head and sampling over one set of buffers.

A step computes the new tokens of some sequences over a paged cache, and the token that follows each sequence.  There
are two kinds:

    decode    one new token a sequence; attention cuts the keys over the GPU (`cki.paged_attention`)
    prefill   any numbers of new tokens, packed one behind the other (`cki.varlen_attention` over the cache)

    [ tokens and tables of the last decode step -> of this one ]
    tokens -> x -> [ norm1 -> qkv -> append (norm, rotation) -> attention -> wo + x
                     -> norm2 -> gate-up -> wd + x ] * layers
           -> rows of the last tokens -> final norm -> head -> logits -> sampling -> next tokens

All of it is pure: operands are names (`cki.operand`), lengths and tables are read on the device, and entries beyond a
step's own are inert.  So one plan serves every smaller step, and a graph of it replays with other contents.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cki import dtypes
from cki.device import DeviceInfo
from cki.dtypes import DType
from cki.engine.config import ModelConfig
from cki.engine.device_weights import weight_specs
from cki.engine.layer_plan import NEXT_GAMMA, LayerPlanner
from cki.engine.products import Products, Stream, Way, Weight
from cki.heuristics.paged import SERIAL_ARCHS
from cki.operand import Operand, dense
from cki.ops.advance import plan_advance
from cki.ops.attention_hopper import workspace_of
from cki.ops.embedding import plan_embed_tokens
from cki.ops.few_rows import ROWS
from cki.ops.linear_decode import Norm
from cki.ops.sampling import plan_sample_tokens
from cki.plan import ArgumentValue, Plan, Step, TensorMapArg

#: Likeliest tokens that a step can report for each sequence.
MAX_ALTERNATIVES = 20
#: Parameters of sampling, one a sequence: names of `plan_sample_tokens`.
SAMPLING = {
    "temperature": dtypes.f32, "top_k": dtypes.i32, "top_p": dtypes.f32, "min_p": dtypes.f32,
    "repetition_penalty": dtypes.f32, "seed": dtypes.i64, "seen_rows": dtypes.i32, "alternatives": dtypes.i32,
}  # fmt: skip
#: Tokens that can end a sequence on the device; the host knows of more.
MAX_ENDS = 8
#: Query rows a sequence from which attention's tiles are the same.
_LONG = 128


@dataclass(frozen=True)
class StepShape:
    """Sizes of a step; smaller ones fit in.  longest: about how many new tokens a sequence has (a hint for tiles)."""

    tokens: int
    sequences: int
    decode: bool
    longest: int = 1

    @property
    def tile_length(self) -> int:
        """longest, as plans depend on it."""
        return min(self.longest, _LONG)


@dataclass(frozen=True)
class CacheGeometry:
    """The paged cache of a step: what `PagedKVCache` was made with."""

    num_blocks: int
    block_size: int
    columns: int


@dataclass(frozen=True)
class DecoderPlanner:
    """Plans steps of one model.

    dtype: of weights, activations, cache and logits.  positions: of the table of cosines and sines.  seen_rows:
    sequences whose tokens are remembered for the repetition penalty.  way: how decode steps launch products of few
    tokens, see `Products`.  merge_inside: their attention merges in its own launch.  fp8: layers' matrices are e4m3
    codes with scales.
    kv_codes: the cache is of e4m3 with a scale a token and head; prefills read copies of 16 bits of what they need.
    """

    config: ModelConfig
    dtype: DType
    cache: CacheGeometry
    positions: int
    seen_rows: int
    way: Way | None = None
    merge_inside: bool = True
    fp8: bool = False
    kv_codes: bool = False

    def buffers(self, shape: StepShape) -> dict[str, tuple[tuple[int, ...], DType]]:
        """Shape and element type of every buffer that a step reads and writes, besides weights, cache and tables."""
        c, t, n = self.config, shape.tokens, shape.sequences
        heads = c.num_heads * c.head_dim
        widest = max(c.hidden_size, heads, c.intermediate_size)
        of_codes = {
            "delta": ((t, c.hidden_size), self.dtype), "last_delta": ((n, c.hidden_size), self.dtype),
            "codes": ((t, widest), dtypes.e4m3),
            "code_scales": ((t, -(-widest // 128)), dtypes.f32),
            "x_codes": ((max(t, ROWS), c.hidden_size), dtypes.e4m3),
            "inner_codes": ((max(t, ROWS), widest), dtypes.e4m3),
            "x_scales": ((t, -(-c.hidden_size // 128)), dtypes.f32),
            "inner_scales": ((t, -(-widest // 128)), dtypes.f32),
        }  # fmt: skip
        kv_shape = (self.cache.columns * self.cache.block_size, c.num_kv_heads, c.head_dim)
        of_cache = {
            "cu_seqlens_k": ((n + 1,), dtypes.i32),
            "k_packed": (kv_shape, self.dtype), "v_packed": (kv_shape, self.dtype),
        }  # fmt: skip
        return {
            **(of_codes if self.fp8 else {}),
            **(of_cache if self.kv_codes else {}),
            "given": ((1,), dtypes.u32),
            "tokens": ((t,), dtypes.i32),
            "last_rows": ((n,), dtypes.i32),
            "ends": ((n, MAX_ENDS), dtypes.i32),
            "limits": ((n,), dtypes.i32),
            "x": ((t, c.hidden_size), self.dtype),
            "normed": ((t, c.hidden_size), self.dtype),
            "squares": ((t, -(-c.hidden_size // 128)), dtypes.f32),
            "qkv": ((t, heads + 2 * c.num_kv_heads * c.head_dim), self.dtype),
            "attended": ((t, heads), self.dtype),
            "inner": ((t, c.intermediate_size), self.dtype),
            "last": ((n, c.hidden_size), self.dtype),
            "logits": ((n, c.vocab_size), self.dtype),
            "sampled": ((n,), dtypes.i32),
            "logprobs": ((n,), dtypes.f32),
            "top_tokens": ((n, MAX_ALTERNATIVES), dtypes.i32),
            "top_logprobs": ((n, MAX_ALTERNATIVES), dtypes.f32),
            "counters": ((n * c.num_heads,), dtypes.u32),  # attention's: zeros before and after each step
            "seen": ((self.seen_rows, -(-c.vocab_size // 32)), dtypes.u32),
            **{name: ((n,), dtype) for name, dtype in SAMPLING.items()},
        }

    def plan(self, shape: StepShape, device: DeviceInfo) -> Plan:
        """The launches from `tokens` to the tokens that follow, `sampled`.

        A decode step takes those of the step before, and advances its tables, unless the host has `given` others.
        """
        buffer = {name: dense(name, *spec) for name, spec in self.buffers(shape).items()}
        specs = weight_specs(self.config, self.dtype, fp8=self.fp8)
        weight = {role: dense(role, *spec) for role, spec in specs.items()}
        steps = self._advance(shape, buffer) if shape.decode else ()
        stream = Stream(buffer["x"], buffer.get("delta"))
        products = Products(device, self.way if shape.decode else "plain")
        workspace: dict[str, int] = {}
        # Layers differ in their tensors, in whether they see a window, and in what the layer before has left to add:
        # each kind is planned once.
        planned: dict[tuple[bool, bool], tuple[str, tuple[Step, ...], Stream]] = {}
        for number, windowed in enumerate(self.config.window_layers):
            prefix = f"layers.{number}."
            layer = LayerPlanner(self, shape, device, products, prefix, windowed, weight, buffer, workspace)
            if not number:
                begin, stream = layer.begin(buffer["tokens"], weight["embed"], stream)
                steps += begin
            kind = windowed, stream.pending
            if kind not in planned:
                planned[kind] = prefix, *layer.steps(stream)
            model_prefix, model_steps, stream = planned[kind]
            is_last = number + 1 == self.config.num_layers
            gamma = "final_norm" if is_last else f"layers.{number + 1}.norm1"
            steps += tuple(
                _with_slots(_with_slots(step, model_prefix, prefix), NEXT_GAMMA, gamma)
                for step in model_steps
            )
        if not shape.decode:
            steps += self._last_rows(stream, buffer, device)
            stream = replace(stream, x=buffer["last"], delta=buffer.get("last_delta"))
        head = Weight(weight.get("head", weight["embed"]))
        norm = Norm(weight["final_norm"], self.config.rms_norm_eps)
        steps += products.project(stream, norm, head, buffer["logits"])
        steps += plan_sample_tokens(
            buffer["logits"], buffer["sampled"], buffer["logprobs"], device,
            top_tokens=buffer["top_tokens"], top_logprobs=buffer["top_logprobs"], seen=buffer["seen"],
            step=dense("seq_lens", (shape.sequences,), dtypes.i32),
            **{name: buffer[name] for name in SAMPLING},
        )  # fmt: skip
        # 64 sequences of Qwen3-8B's shapes: 5.7 ms instead of 6.1 (an H200); with bf16 weights no difference.
        if self.fp8 and shape.decode and device.arch not in SERIAL_ARCHS:
            steps = tuple(map(_overlapping, steps))
        workspace |= dict(workspace_of(steps))
        return Plan(steps, tuple(workspace.items()))

    def _last_rows(self, stream: Stream, buffer: dict[str, Operand], device: DeviceInfo) -> tuple[Step, ...]:
        """The rows of prompts' last tokens."""
        steps = plan_embed_tokens(buffer["last_rows"], stream.x, buffer["last"], device)
        if stream.pending and stream.delta is not None:
            steps += plan_embed_tokens(buffer["last_rows"], stream.delta, buffer["last_delta"], device)
        return steps

    def _advance(self, shape: StepShape, buffer: dict[str, Operand]) -> tuple[Step, ...]:
        n = (shape.sequences,)
        return plan_advance(
            buffer["given"], buffer["sampled"], buffer["ends"], buffer["limits"],
            dense("block_table", (*n, self.cache.columns), dtypes.i32), block_size=self.cache.block_size,
            tokens=buffer["tokens"], seq_lens=dense("seq_lens", n, dtypes.i32),
            positions=dense("positions", n, dtypes.i32), slots=dense("slot_mapping", n, dtypes.i64),
        )  # fmt: skip


def _overlapping(step: Step) -> Step:
    """The launch, begun while the one before ends, where its kernel can wait for that."""
    constants = dict(step.kernel.constants)
    if constants.get("kOverlaps", True):
        return step
    archs = tuple(arch for arch in step.kernel.archs if arch not in SERIAL_ARCHS)
    constants["kOverlaps"] = True
    kernel = replace(step.kernel, constants=tuple(sorted(constants.items())), archs=archs)
    return replace(step, kernel=kernel, programmatic=True)


def _with_slots(step: Step, old: str, new: str) -> Step:
    """The step on the tensors whose names begin with `new` in place of `old`."""

    def moved(argument: ArgumentValue) -> ArgumentValue:
        if isinstance(argument, Operand) and argument.slot.startswith(old):
            return replace(argument, slot=new + argument.slot.removeprefix(old))
        if isinstance(argument, TensorMapArg) and argument.operand.slot.startswith(old):
            operand = argument.operand
            return replace(argument, operand=replace(operand, slot=new + operand.slot.removeprefix(old)))
        return argument

    return step if old == new else replace(step, args=tuple(moved(argument) for argument in step.args))
