"""The attention block and the whole encoder layer, each one operation.

`fused_attention` is layer norm, Q, K and V projections, attention and output projection, with the residual addition;
`encoder_layer` adds the feed-forward block and its layer norm.  They are composed of the kernels of `layer_norm`,
`linear` and `attention` over one workspace (`cki.ops.encoder_blocks`): 4 launches for the block, 7 for a layer.

What lies between the steps has x's type: results are those of the same chain of operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cki import config, dtypes
from cki.device import DeviceInfo, sim_device
from cki.dtypes import DType
from cki.heuristics.linear import ACTIVATIONS
from cki.kernel import KernelSpec
from cki.operand import Operand, dense
from cki.ops.attention import MAX_HEAD_DIM
from cki.ops.attention_hopper import workspace_of
from cki.ops.attention_rules import check_scale
from cki.ops.call import call
from cki.ops.encoder_blocks import (
    AttentionBlock,
    FeedForward,
    FusedNorm,
    attention_scratch,
    packed_sequences,
    plan_attention_block,
    tile_length,
)
from cki.ops.encoder_inputs import validate_offsets
from cki.ops.encoder_layers import plan_stack
from cki.ops.linear import Activation, WeightLayout, check_linear, check_vector
from cki.ops.spec import Attribute, Input, OpSpec, OutputSpec, Problem
from cki.ops.validate import shape_of
from cki.plan import Plan


def fused_attention(
    x: Any, wq: Any, wk: Any, wv: Any, wo: Any, gamma: Any = None, beta: Any = None, bq: Any = None, bk: Any = None,
    bv: Any = None, bo: Any = None, mask: Any = None, *, num_heads: int, head_dim: int, num_kv_heads: int | None = None,
    causal: bool = False, pre_ln: bool = True, residual: bool = True, epsilon: float = 1e-5, scale: float | None = None,
    weight_layout: WeightLayout = "in_out", cu_seqlens: Any = None, max_seqlen: int | None = None, out: Any = None,
    stream: Any = None,
) -> Any:  # fmt: skip
    """The self-attention block of a transformer: layer norm, projections, softmax(Q K^T scale) V, output projection.

    With A(u) = attention(u wq + bq, u wk + bk, u wv + bv) wo + bo:

        pre_ln=True     y = A(LN(x)) + x        (GPT-2, ViT)
        pre_ln=False    y = LN(A(x) + x)        (BERT)

    residual=False leaves out "+ x": a block for a framework that adds it.

    x: [batch, seq, hidden], f32, f16 or bf16, any strides.
    wq: [hidden, num_heads * head_dim].  wk, wv: [hidden, num_kv_heads * head_dim].  wo: [num_heads * head_dim, hidden].
        All of x's type, any strides, [in, out] for weight_layout "in_out"; for "out_in" the two axes change places, as
        torch's `nn.Linear` stores them.  Outputs go by head.  One launch computes Q, K and V when the three have the
        same strides and all or none have a bias.
        wk and wv None: wq holds all three, [hidden, (num_heads + 2 num_kv_heads) * head_dim], and bq their biases.
    gamma, beta: [hidden], weight and bias of the layer norm; None is 1 and 0.
    bq, bk, bv, bo: biases, f32 or x's type; None is none.
    mask: bool or u8, True (not 0) keeps a key: [batch, seq] over keys (padding), [batch, seq, seq] over queries and
        keys, or of four axes, broadcastable to [batch, num_heads, seq, seq].  Extents may be 1.
    num_heads, head_dim: of the queries.  num_kv_heads: divides num_heads; default num_heads.
    causal: query i sees keys up to i.  scale: default 1/sqrt(head_dim).  epsilon: added to the norm's variance.
    cu_seqlens: i32 or i64 [batch + 1], for sequences packed one behind the other without padding: x is
        [tokens, hidden], sequence b its rows from cu_seqlens[b] up to cu_seqlens[b + 1]; no mask.  Read on the device,
        so a captured graph serves other lengths; CKI_VALIDATE=1 checks it.  max_seqlen: the longest, if known: a hint
        for speed.
    out: where to write y; apart from the inputs.

    Returns y of x's shape and type.  A query that sees no key attends to nothing: A is bo.
    Raises InvalidArgumentError or InvalidTypeError, before any launch, with every rule that is broken.
    """
    validate_sequences(x, cu_seqlens)
    return call(
        FUSED_ATTENTION, (x, wq, wk, wv, wo, gamma, beta, bq, bk, bv, bo, mask, cu_seqlens),
        (
            num_heads, head_dim, num_kv_heads, causal, pre_ln, residual, epsilon, scale, weight_layout,
            tile_length(max_seqlen),
        ),
        (out,), stream,
    )  # fmt: skip


def encoder_layer(
    x: Any, wq: Any, wk: Any, wv: Any, wo: Any, w1: Any, w2: Any, *, attention_gamma: Any = None,
    attention_beta: Any = None, output_gamma: Any = None, output_beta: Any = None, bq: Any = None, bk: Any = None,
    bv: Any = None, bo: Any = None, b1: Any = None, b2: Any = None, mask: Any = None, num_heads: int, head_dim: int,
    num_kv_heads: int | None = None, causal: bool = False, pre_ln: bool = True, activation: Activation | None = "gelu",
    epsilon: float = 1e-5, scale: float | None = None, weight_layout: WeightLayout = "in_out", cu_seqlens: Any = None,
    max_seqlen: int | None = None, folded: bool = False, out: Any = None, stream: Any = None,
) -> Any:  # fmt: skip
    """A transformer encoder layer: attention block, then feed-forward block F(u) = activation(u w1 + b1) w2 + b2.

        pre_ln=True     a = A(LN(x)) + x        y = F(LN'(a)) + a
        pre_ln=False    a = LN(A(x) + x)        y = LN'(F(a) + a)        (BERT)

    The attention block A, x, its weights, mask, heads, causal, scale, cu_seqlens: see `fused_attention`.
    w1: [hidden, inner].  w2: [inner, hidden].  b1: [inner].  b2: [hidden].
    weight_layout: of all six weights; "in_out" is [in, out], as written here, "out_in" what torch stores.
    attention_gamma, attention_beta: of the attention block's norm LN.  output_gamma, output_beta: of the feed-forward
        block's norm LN'.  [hidden] each; None is 1 and 0.
    activation: None, "gelu", "gelu_tanh", "silu" or "relu": see `linear`.
    folded: the norms' weights are in wq, bq, w1 and b1, as `cki.prepare` puts them: a launch less.  With pre_ln only.
    out: where to write y; apart from the inputs.

    Returns y of x's shape and type.
    Raises InvalidArgumentError or InvalidTypeError, before any launch, with every rule that is broken.
    """
    validate_sequences(x, cu_seqlens)
    return call(
        ENCODER_LAYER,
        (
            x, wq, wk, wv, wo, w1, w2, attention_gamma, attention_beta, output_gamma, output_beta,
            bq, bk, bv, bo, b1, b2, mask, cu_seqlens,
        ),
        (
            num_heads, head_dim, num_kv_heads, causal, pre_ln, activation, epsilon, scale, weight_layout,
            tile_length(max_seqlen), folded,
        ),
        (out,), stream,
    )  # fmt: skip


def validate_sequences(x: Any, cu_seqlens: Any) -> None:
    """CKI_VALIDATE=1 looks at the offsets of packed sequences."""
    if cu_seqlens is not None and config.flag("CKI_VALIDATE") and shape_of(x):
        validate_offsets(cu_seqlens, int(x.shape[0]))


def _front(problem: Problem, w: str) -> FusedNorm | None:
    return FusedNorm(problem[w], problem.get("b" + w[1])) if problem.attributes.get("folded") else None


def _attention_block(problem: Problem, gamma: str, beta: str, *, residual: bool) -> AttentionBlock:
    get, attribute = problem.get, problem.attribute
    heads, offsets = attribute("num_heads"), get("cu_seqlens")
    packed = None
    if offsets is not None:
        packed = packed_sequences(offsets, problem["x"].shape[0], attribute("max_seqlen"))
    return AttentionBlock(
        problem["wq"], get("wk"), get("wv"), problem["wo"], gamma=get(gamma), beta=get(beta), bq=get("bq"),
        bk=get("bk"), bv=get("bv"), bo=get("bo"), mask=get("mask"), num_heads=heads, head_dim=attribute("head_dim"),
        num_kv_heads=attribute("num_kv_heads") or heads, causal=attribute("causal"), pre_ln=attribute("pre_ln"),
        residual=residual, epsilon=attribute("epsilon"), scale=attribute("scale"),
        weight_layout=attribute("weight_layout"), packed=packed, front=_front(problem, "wq"),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# rules

_UNREADABLE = -(2**31)  # stands for a required attribute of a wrong type, which has been reported as such
_FLOATS = (dtypes.f32, dtypes.f16, dtypes.bf16)


def _check_heads(problem: Problem) -> tuple[int, int, int] | None:
    """(num_heads, num_kv_heads, head_dim), or None when they are wrong."""
    heads, head_dim = problem.attribute("num_heads"), problem.attribute("head_dim")
    kv_heads = problem.attribute("num_kv_heads")
    if _UNREADABLE in (heads, head_dim):
        return None
    before = len(problem.violations)
    if not 1 <= heads <= 2**16:
        problem.reject(f"num_heads is {heads}", "num_heads of 1 to 65536")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        problem.reject(f"head_dim is {head_dim}", f"a head_dim of 1 to {MAX_HEAD_DIM}")
    if kv_heads is None:
        kv_heads = heads
    elif kv_heads < 1 or heads % kv_heads:
        problem.reject(
            f"num_kv_heads is {kv_heads}, num_heads is {heads}", "num_kv_heads that divides num_heads"
        )
    return (heads, kv_heads, head_dim) if len(problem.violations) == before else None


def _check_mask(problem: Problem, heads: int) -> None:
    mask, x = problem.get("mask"), problem["x"]
    if mask is None or x.ndim != 3:
        return
    batch, seq, _ = x.shape
    full = {2: (batch, seq), 3: (batch, seq, seq), 4: (batch, heads, seq, seq)}.get(mask.ndim)
    if full is None or any(have not in (1, want) for have, want in zip(mask.shape, full)):
        problem.reject(
            f"mask has shape {mask.shape}, x has shape {x.shape}",
            f"mask of shape {(batch, seq)}, {(batch, seq, seq)} or {(batch, heads, seq, seq)}, or 1 for an extent",
        )


def _layout(problem: Problem) -> str:
    """weight_layout; "in_out" where it is another word, which is noted."""
    layout: str = problem.attribute("weight_layout")
    if layout not in ("in_out", "out_in"):
        problem.reject(f"weight_layout is {layout!r}", 'weight_layout "in_out" or "out_in"')
        return "in_out"
    return layout


def _check_projections(problem: Problem, hidden: int, q_columns: int, kv_columns: int, layout: str) -> None:
    present = [name for name in ("wk", "wv") if problem.get(name) is not None]
    if len(present) == 2:
        check_linear(problem, hidden, q_columns, ("x", "wq", "bq"), layout)
        for names in (("x", "wk", "bk"), ("x", "wv", "bv")):
            check_linear(problem, hidden, kv_columns, names, layout)
    elif present:
        problem.reject(f"{present[0]} is given alone", "wk and wv, or neither, for a wq that holds all three")
    else:
        check_linear(problem, hidden, q_columns + 2 * kv_columns, ("x", "wq", "bq"), layout)
        for name in ("bk", "bv"):
            if problem.get(name) is not None:
                problem.reject(f"{name} is given without w{name[1]}", "all three biases in bq")
    check_linear(problem, q_columns, hidden, ("x", "wo", "bo"), layout)


def _check_sequences(problem: Problem) -> None:
    """cu_seqlens, and what goes with it."""
    offsets, longest = problem.get("cu_seqlens"), problem.attribute("max_seqlen")
    if longest is not None and longest < 0:
        problem.reject(f"max_seqlen is {longest}", "max_seqlen of at least 0, or None")
    if offsets is None:
        return
    if offsets.dtype not in (dtypes.i32, dtypes.i64):
        problem.reject_type(f"cu_seqlens is {offsets.dtype}", "cu_seqlens of int32 or int64")
    if offsets.ndim != 1 or offsets.shape[0] < 2:
        problem.reject(
            f"cu_seqlens has shape {offsets.shape}",
            "cu_seqlens of shape (batch + 1,), for a sequence or more",
        )
    if problem.get("mask") is not None:
        problem.reject("mask and cu_seqlens are both given", "one of the two")


def _check_block(problem: Problem, gamma: str, beta: str, layout: str) -> int:
    """The rules of an attention block; returns x's hidden size, -1 where it is not known."""
    x = problem["x"]
    if x.dtype not in _FLOATS:
        problem.reject_type(f"x is {x.dtype}", "x of f32, f16 or bf16")
    if problem.attribute("epsilon") < 0:
        problem.reject(f"epsilon is {problem.attribute('epsilon')}", "epsilon of 0 or more")
    check_scale(problem)
    counts = _check_heads(problem)
    _check_sequences(problem)
    axes = "batch, seq, hidden" if problem.get("cu_seqlens") is None else "tokens, hidden"
    if x.ndim != axes.count(",") + 1 or x.shape[-1] < 1:
        problem.reject(f"x has shape {x.shape}", f"x of shape [{axes}], hidden 1 or more")
    elif x.shape[-2] >= 2**29:
        problem.reject(f"x has shape {x.shape}", "fewer than 2**29 tokens a sequence")
    hidden = x.shape[-1] if x.ndim and x.shape[-1] else -1
    q_columns, kv_columns = (-1, -1) if counts is None else (counts[0] * counts[2], counts[1] * counts[2])
    _check_projections(problem, hidden, q_columns, kv_columns, layout)
    problem.require_dtypes((dtypes.bool_, dtypes.u8), "bool or u8", "mask")
    if counts is not None:
        _check_mask(problem, counts[0])
    check_vectors(problem, (gamma, beta), hidden, x)
    return hidden


def check_vectors(problem: Problem, names: tuple[str, ...], hidden: int, x: Operand) -> None:
    """Of those that are given; -1: any extent."""
    for name in names:
        if problem.get(name) is not None:
            check_vector(problem, name, hidden if hidden > 0 else None, x)


def _check_fused_attention(problem: Problem) -> None:
    _check_block(problem, "gamma", "beta", _layout(problem))


def _check_encoder_layer(problem: Problem) -> None:
    if problem.attribute("activation") not in ACTIVATIONS:
        known = ", ".join(repr(name) for name in ACTIVATIONS if name) + " or None"
        problem.reject(f"activation is {problem.attribute('activation')!r}", f"activation {known}")
    layout = _layout(problem)
    hidden = _check_block(problem, "attention_gamma", "attention_beta", layout)
    x, w1 = problem["x"], problem["w1"]
    check_linear(problem, hidden, -1, ("x", "w1", "b1"), layout)
    inner = w1.shape[1 if layout == "in_out" else 0] if w1.ndim == 2 else -1
    check_linear(problem, inner, hidden, ("x", "w2", "b2"), layout)
    check_vectors(problem, ("output_gamma", "output_beta"), hidden, x)
    if problem.attribute("folded"):
        _check_folded(problem)


def _check_folded(problem: Problem) -> None:
    if not problem.attribute("pre_ln"):
        problem.reject("folded is True, pre_ln False", "norms in front of the blocks, to fold them")
    for name in ("attention_gamma", "attention_beta", "output_gamma", "output_beta", "wk", "wv"):
        if problem.get(name) is not None:
            problem.reject(f"{name} is given with folded=True", "what cki.prepare returned, without it")


def _infer(problem: Problem) -> Mapping[str, OutputSpec]:
    return {"out": OutputSpec(problem["x"].shape, problem["x"].dtype)}


def as_batch(x: Operand) -> Operand:
    """Packed tokens as a batch of one."""
    return x if x.ndim == 3 else x.view((1, *x.shape), (0, *x.strides))


def _plan_fused_attention(problem: Problem, outputs: Mapping[str, Operand], device: DeviceInfo) -> Plan:
    x, y = as_batch(problem["x"]), as_batch(outputs["out"])
    block = _attention_block(problem, "gamma", "beta", residual=problem.attribute("residual"))
    nbytes = attention_scratch(x, block)
    steps = plan_attention_block(x, block, y, dense("scratch", (nbytes,), dtypes.u8), device).steps
    return Plan(steps, (("scratch", nbytes), *workspace_of(steps)))


def layer_blocks(problem: Problem) -> tuple[AttentionBlock, FeedForward]:
    """The two blocks of an encoder layer."""
    feed_forward = FeedForward(
        problem["w1"], problem["w2"], problem.get("b1"), problem.get("b2"), problem.get("output_gamma"),
        problem.get("output_beta"), problem.attribute("activation"), problem.attribute("pre_ln"),
        problem.attribute("epsilon"), problem.attribute("weight_layout"), _front(problem, "w1"),
    )  # fmt: skip
    return _attention_block(problem, "attention_gamma", "attention_beta", residual=True), feed_forward


def _plan_encoder_layer(problem: Problem, outputs: Mapping[str, Operand], device: DeviceInfo) -> Plan:
    return plan_stack(as_batch(problem["x"]), [layer_blocks(problem)], as_batch(outputs["out"]), device)


_BLOCK_ATTRIBUTES = (
    Attribute("num_heads", int, _UNREADABLE), Attribute("head_dim", int, _UNREADABLE), Attribute("num_kv_heads", int),
    Attribute("causal", bool, False), Attribute("pre_ln", bool, True),
)  # fmt: skip
_LAST_ATTRIBUTES = (Attribute("weight_layout", str, "in_out"), Attribute("max_seqlen", int))


def _inputs(names: str, optional: str) -> tuple[Input, ...]:
    """Inputs in order; wk and wv among the first may be left out."""
    first = (Input(name, name in ("wk", "wv")) for name in names.split())
    return (*first, *(Input(name, True) for name in optional.split()))


FUSED_ATTENTION = OpSpec(
    name="fused_attention",
    inputs=_inputs("x wq wk wv wo", "gamma beta bq bk bv bo mask cu_seqlens"),
    attributes=(
        *_BLOCK_ATTRIBUTES, Attribute("residual", bool, True), Attribute("epsilon", float, 1e-5),
        Attribute("scale", float), *_LAST_ATTRIBUTES,
    ),
    outputs=("out",),
    check=_check_fused_attention,
    infer=_infer,
    plan=_plan_fused_attention,
)  # fmt: skip

ENCODER_LAYER = OpSpec(
    name="encoder_layer",
    inputs=_inputs(
        "x wq wk wv wo w1 w2",
        "attention_gamma attention_beta output_gamma output_beta bq bk bv bo b1 b2 mask cu_seqlens",
    ),
    attributes=(
        *_BLOCK_ATTRIBUTES, Attribute("activation", str), Attribute("epsilon", float, 1e-5), Attribute("scale", float),
        *_LAST_ATTRIBUTES, Attribute("folded", bool, False),
    ),
    outputs=("out",),
    check=_check_encoder_layer,
    infer=_infer,
    plan=_plan_encoder_layer,
)  # fmt: skip


def representative_specs(arch: str) -> list[KernelSpec]:
    """The kernels of a layer of all-MiniLM-L6-v2 (fp32) and of BERT-large (f16, both norm orders)."""
    device = sim_device(arch)
    found: dict[KernelSpec, None] = {}
    for dtype, batch, seq, hidden, heads, pre_ln in (
        (dtypes.f32, 6, 16, 384, 12, False), (dtypes.f16, 4, 512, 1024, 16, False),
        (dtypes.f16, 4, 512, 1024, 16, True),
    ):  # fmt: skip
        for step in _plan_encoder_layer(*_example(batch, seq, hidden, heads, pre_ln, dtype), device).steps:
            found[step.kernel] = None
    return list(found)


def _example(
    batch: int, seq: int, hidden: int, heads: int, pre_ln: bool, dtype: DType
) -> tuple[Problem, dict[str, Operand]]:
    """A BERT layer with padding mask, for planning without tensors."""
    inner = 4 * hidden
    shapes = {"x": (batch, seq, hidden), "w1": (hidden, inner), "w2": (inner, hidden), "b1": (inner,)}
    shapes |= dict.fromkeys(("wq", "wk", "wv", "wo"), (hidden, hidden))
    shapes |= {
        item.name: (hidden,)
        for item in ENCODER_LAYER.inputs
        if item.name not in {*shapes, "mask", "cu_seqlens"}
    }
    operands: dict[str, Operand | None] = {name: dense(name, shape, dtype) for name, shape in shapes.items()}
    operands["mask"] = dense("mask", (batch, seq), dtypes.bool_)
    attributes = {attribute.name: attribute.default for attribute in ENCODER_LAYER.attributes}
    attributes |= {"num_heads": heads, "head_dim": hidden // heads, "pre_ln": pre_ln, "activation": "gelu"}
    return Problem(operands, attributes), {"out": dense("out", (batch, seq, hidden), dtype)}
