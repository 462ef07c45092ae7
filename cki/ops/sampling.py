"""The next token of each row of logits: greedy or drawn, exactly.  Kernel: `cuda_src/sampling/sample.cu`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cki import dtypes
from cki.device import DeviceInfo, sim_device
from cki.dtypes import DType
from cki.kernel import ARCHITECTURES, KernelSpec, kernel_spec
from cki.operand import Operand, dense
from cki.ops.advance import advance_kernel
from cki.ops.call import call
from cki.ops.pointwise_rules import FLOATS, check_floats
from cki.ops.spec import Attribute, Input, OpSpec, OutputSpec, Problem
from cki.plan import ArgumentValue, NullPointer, Plan, Step

#: Vocabularies that a block of few threads reads in one turn or two.
_SMALL_VOCABULARY = 4096
#: With 1024 threads, 64 registers each, four groups of tokens under way spilled.
_MOST_THREADS = 512
#: Architectures on which blocks can share a row's first pass, where it is long.
_CLUSTER_ARCHS = ("sm_90a", "sm_100a", "sm_120a")
_OTHER_ARCHS = tuple(arch for arch in ARCHITECTURES if arch not in _CLUSTER_ARCHS)
#: The kernel counts tokens in 32 bits, up to a turn of its largest block beyond the last.
_LARGEST_VOCABULARY = 2**31 - 2**15
_STEPS = (dtypes.i32, dtypes.i64)
#: Parameters of a row, with their type.
_PARAMETERS = {
    "temperature": dtypes.f32, "top_k": dtypes.i32, "top_p": dtypes.f32, "min_p": dtypes.f32,
    "repetition_penalty": dtypes.f32, "seed": dtypes.i64, "step": None, "seen_rows": dtypes.i32,
    "alternatives": dtypes.i32,
}  # fmt: skip
_PARAMS = "P" * 15 + "i" * 3 + "q" * 16


def sample_tokens(
    logits: Any, *, temperature: Any = None, top_k: Any = None, top_p: Any = None, min_p: Any = None,
    repetition_penalty: Any = None, seen: Any = None, seen_rows: Any = None, seed: Any = None, step: Any = None,
    alternatives: Any = None, max_alternatives: int = 0, tokens_out: Any = None, logprobs_out: Any = None,
    stream: Any = None,
) -> Any:  # fmt: skip
    """The next token of each row of logits.

    logits: [batch, vocabulary], f32, f16 or bf16, any strides; NaN counts as -infinity.
    Parameters are tensors [batch] on the device, one value a row; None is the neutral value for all rows:
    temperature: f32; 0 (or less) takes the largest logit, the lowest token among equals.  Default 1.
    top_k: i32; only the k likeliest tokens, 0 is all.  top_p: f32; of those the fewest, likeliest first, whose
    probability is at least top_p (1 or more is all).  min_p: f32; of those the ones with min_p times the largest
    probability or more.  All three look at probabilities after the temperature; equal ones are in the order of tokens.
    repetition_penalty: f32; logits of seen tokens are divided by it where positive, else multiplied (Keskar et al.
    2019, arXiv:1909.05858).
    seen: i32 or u32 [sequences, words], bit token % 32 of word token / 32 says that a sequence has the token; the
    token that is chosen is added.  seen_rows: i32, which row of it belongs to a row of logits; negative is none.
    seed, step: i64, and i32 or i64.  A row's token depends on its logits, parameters, seed and step, and on
    nothing else: give each token of a sequence another step.  Default 0.
    alternatives: i32, how many of the likeliest tokens are wanted, up to max_alternatives.

    Returns (tokens i32 [batch], logprobs f32 [batch]), the natural logarithm of softmax(logits) at the token, without
    temperature and penalty; with max_alternatives also (top_tokens i32, top_logprobs f32) [batch, max_alternatives],
    the likeliest first, written as far as `alternatives` says.
    The definition is tests/engine/sampling_definition.py.  Raises InvalidArgumentError or InvalidTypeError before any
    launch.
    """
    inputs = (
        logits, temperature, top_k, top_p, min_p, repetition_penalty, seen, seen_rows, seed, step, alternatives,
    )  # fmt: skip
    return call(SAMPLE_TOKENS, inputs, (max_alternatives,), (tokens_out, logprobs_out, None, None), stream)


def _check(problem: Problem) -> None:
    logits, most = problem["logits"], problem.attribute("max_alternatives")
    check_floats(problem, "logits")
    if logits.ndim != 2 or not 1 <= logits.shape[-1] <= _LARGEST_VOCABULARY:
        problem.reject(
            f"logits has shape {logits.shape}",
            f"logits of shape [batch, vocabulary], a vocabulary of 1 to {_LARGEST_VOCABULARY}",
        )
        return
    batch, vocabulary = logits.shape
    if not 0 <= most <= vocabulary:
        problem.reject(
            f"max_alternatives is {most}", f"max_alternatives of 0 to the vocabulary, {vocabulary}"
        )
    for name, dtype in _PARAMETERS.items():
        tensor = problem.get(name)
        if tensor is None:
            continue
        if tensor.shape != (batch,):
            problem.reject(
                f"{name} has shape {tensor.shape}, logits has shape {logits.shape}",
                f"{name} of shape {(batch,)}",
            )
        allowed = _STEPS if dtype is None else (dtype,)
        if tensor.dtype not in allowed:
            names = " or ".join(t.name for t in allowed)
            problem.reject_type(f"{name} is {tensor.dtype}", f"{name} of {names}")
    _check_seen(problem, vocabulary)


def _check_seen(problem: Problem, vocabulary: int) -> None:
    seen, words = problem.get("seen"), -(-vocabulary // 32)
    if (seen is None) != (problem.get("seen_rows") is None):
        given, lacking = ("seen_rows", "seen") if seen is None else ("seen", "seen_rows")
        problem.reject(f"{given} is given without {lacking}", "both, or neither")
    if seen is None:
        if problem.get("repetition_penalty") is not None:
            problem.reject("repetition_penalty is given without seen", "seen and seen_rows")
        return
    if seen.dtype not in (dtypes.i32, dtypes.u32):
        problem.reject_type(f"seen is {seen.dtype}", "seen of i32 or u32")
    if seen.ndim != 2 or seen.shape[1] < words:
        problem.reject(
            f"seen has shape {seen.shape}, the vocabulary {vocabulary}", f"seen of shape [sequences, {words}]"
        )
    elif seen.shape[1] > 1 and seen.strides[1] != 1:
        problem.reject(f"seen has strides {seen.strides}", "seen with dense rows")


def _infer(problem: Problem) -> Mapping[str, OutputSpec]:
    batch, columns = problem["logits"].shape[0], problem.attribute("max_alternatives")
    outputs = {"tokens": OutputSpec((batch,), dtypes.i32), "logprobs": OutputSpec((batch,), dtypes.f32)}
    if columns:
        outputs["top_tokens"] = OutputSpec((batch, columns), dtypes.i32)
        outputs["top_logprobs"] = OutputSpec((batch, columns), dtypes.f32)
    return outputs


def plan_sample_tokens(
    logits: Operand, tokens: Operand, logprobs: Operand, device: DeviceInfo, *, top_tokens: Operand | None = None,
    top_logprobs: Operand | None = None, seen: Operand | None = None, **parameters: Operand | None,
) -> tuple[Step, ...]:  # fmt: skip
    """Steps of one sampling over operands (see `sample_tokens`); parameters by name, None or left out where neutral."""
    batch, vocabulary = logits.shape
    if not batch:
        return ()
    given = {name: parameters.get(name) for name in _PARAMETERS}
    step = given["step"]
    is_long = vocabulary > _SMALL_VOCABULARY
    threads = _MOST_THREADS if is_long else 256
    blocks = _cluster(batch, device) if is_long else 1
    unit = logits.shape[1] == 1 or logits.strides[1] == 1
    kernel = sample_kernel(
        logits.dtype, threads, vector_loads=unit and logits.is_aligned(4 * logits.dtype.itemsize),
        step=dtypes.i32 if step is None else step.dtype, blocks=blocks, arch=device.arch,
    )  # fmt: skip

    def pointers(*operands: Operand | None) -> tuple[ArgumentValue, ...]:
        return tuple(NullPointer() if operand is None else operand for operand in operands)

    def stride(operand: Operand | None) -> int:
        return 0 if operand is None else operand.strides[0]

    first = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "step")
    arguments: tuple[ArgumentValue, ...] = (
        logits, *pointers(*(given[name] for name in first), seen, given["seen_rows"], given["alternatives"]),
        tokens, logprobs, *pointers(top_tokens, top_logprobs), vocabulary,
        0 if top_tokens is None else top_tokens.shape[1], 0 if seen is None else seen.shape[0],
        logits.strides[0], logits.strides[1], *(stride(given[name]) for name in first), stride(seen),
        stride(given["seen_rows"]), stride(given["alternatives"]), tokens.strides[0], logprobs.strides[0],
        stride(top_tokens), stride(top_logprobs),
    )  # fmt: skip
    reason = f"{blocks} blocks of {threads} threads a row of {vocabulary}"
    launch = Step(
        kernel, (batch * blocks, 1, 1), (threads, 1, 1), arguments, cluster=(blocks, 1, 1),
        programmatic=bool(kernel.constant("kProgrammatic")), reason=reason,
    )  # fmt: skip
    return (launch,)


def _cluster(batch: int, device: DeviceInfo) -> int:
    """Blocks that share a row, so many that all run at a time; of clusters of four and more some SMs have none.

    16 and 64 rows of Qwen3-8B's vocabulary take 18 and 28 us, and 24 and 45 by eight blocks each (an H200).
    """
    if device.arch not in _CLUSTER_ARCHS:
        return 1
    return next(n for n in (8, 4, 2, 1) if n == 1 or batch * n <= device.sm_count * (1 if n == 2 else 0.9))


def sample_kernel(
    dtype: DType, threads: int, *, vector_loads: bool, step: DType, blocks: int = 1, arch: str = "sm_90a"
) -> KernelSpec:
    """The kernel of one configuration.  blocks: of a cluster, which shares a row."""
    programmatic = arch in _CLUSTER_ARCHS
    return kernel_spec(
        "sampling/sample.cu", "sample", _PARAMS, archs=_CLUSTER_ARCHS if programmatic else _OTHER_ARCHS,
        max_registers=min(255, 65536 // threads), Element=dtype, StepIndex=step, kThreads=threads, kBlocks=blocks,
        kVectorLoads=vector_loads, kProgrammatic=programmatic,
    )  # fmt: skip


def _plan(problem: Problem, outputs: Mapping[str, Operand], device: DeviceInfo) -> Plan:
    return Plan(plan_sample_tokens(
        problem["logits"], outputs["tokens"], outputs["logprobs"], device, top_tokens=outputs.get("top_tokens"),
        top_logprobs=outputs.get("top_logprobs"), seen=problem.get("seen"),
        **{name: problem.get(name) for name in _PARAMETERS},
    ))  # fmt: skip


SAMPLE_TOKENS = OpSpec(
    name="sample_tokens",
    inputs=(
        Input("logits"), Input("temperature", True), Input("top_k", True), Input("top_p", True), Input("min_p", True),
        Input("repetition_penalty", True), Input("seen", True, written=True), Input("seen_rows", True),
        Input("seed", True), Input("step", True), Input("alternatives", True),
    ),
    attributes=(Attribute("max_alternatives", int, 0),),
    outputs=("tokens", "logprobs", "top_tokens", "top_logprobs"),
    check=_check,
    infer=_infer,
    plan=_plan,
)  # fmt: skip


def representative_specs(arch: str) -> list[KernelSpec]:
    """Kernels that stand for all: each type with both sizes of blocks, aligned and not; and what begins a step."""
    device = sim_device(arch)
    found: dict[KernelSpec, None] = {}
    for dtype in FLOATS:
        for vocabulary in (1001, 151936):
            logits = dense("logits", (4, vocabulary), dtype)
            tokens, logprobs = dense("tokens", (4,), dtypes.i32), dense("logprobs", (4,), dtypes.f32)
            for step in plan_sample_tokens(logits, tokens, logprobs, device, step=tokens):
                found[step.kernel] = None
    return [*found, advance_kernel()]
