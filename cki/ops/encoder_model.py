"""A whole BERT-like encoder as one operation: embeddings, every layer, and pooling in one plan over one workspace.

All launches of a forward pass are planned together.  So a call costs the host one look-up, the layers take turns with
the same memory (two tensors of activations and one layer's scratch, whatever the number of layers), and a captured
graph holds one workspace.  `cki.Encoder` is the user's side of it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

from cki import dtypes
from cki.device import DeviceInfo
from cki.operand import Operand, dense
from cki.ops.attention_hopper import workspace_of
from cki.ops.embedding import plan_embed_tokens, plan_mean_pool
from cki.ops.encoder_blocks import (
    AttentionBlock,
    FeedForward,
    FusedNorm,
    aligned,
    packed_sequences,
)
from cki.ops.encoder_inputs import LENGTH_TYPES, MASK_TYPES, plan_padding_mask, plan_token_positions
from cki.ops.encoder_layers import layer_scratch, layer_statistics, plan_layers, statistics_nbytes
from cki.ops.norm import plan_layer_norm
from cki.ops.spec import Attribute, Input, OpSpec, OutputSpec, Problem
from cki.plan import Plan, Step

#: What a call brings.  workspace: memory of the caller's instead of the plan's own.
CALL_INPUTS = (
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "position_ids",
    "lengths",
    "cu_seqlens",
    "workspace",
)
#: Weights of the whole model, then of each layer: `layers.0.wq`.
MODEL_WEIGHTS = (
    "words", "positions", "types", "embedding_gamma", "embedding_beta", "final_gamma", "final_beta",
)  # fmt: skip
LAYER_MATRICES = ("wq", "wk", "wv", "wo", "w1", "w2")
LAYER_VECTORS = (
    "bq", "bk", "bv", "bo", "b1", "b2", "attention_gamma", "attention_beta", "output_gamma", "output_beta",
)  # fmt: skip
LAYER_WEIGHTS = (*LAYER_MATRICES, *LAYER_VECTORS)
#: Of a post-LN layer, besides, with the norms in front of its blocks in them (`Encoder.prepare`).
FUSED_WEIGHTS = ("fused_wq", "fused_bq", "fused_bo", "fused_w1", "fused_b1", "fused_b2")
POOLINGS = (None, "mean", "first")
_IDS = (dtypes.i32, dtypes.i64)


def weight_names(layers: int) -> tuple[str, ...]:
    """The names of all weights of a model, in the order of the operation's inputs."""
    names = (*LAYER_WEIGHTS, *FUSED_WEIGHTS)
    return (*MODEL_WEIGHTS, *(f"layers.{n}.{name}" for n in range(layers) for name in names))


@functools.lru_cache(maxsize=256)
def encoder_spec(layers: int) -> OpSpec:
    """The operation for a number of layers.

    Attributes are those of `encoder_layer`, and: padding_id, RoBERTa's rule for positions, or None to count from 0;
    pooling, one of POOLINGS; normalize, of the pooled vector.  The weights were checked when the model was made
    (`cki.encoder.weights`): the rules here are those of the call.
    """
    return OpSpec(
        name="encoder",
        inputs=(
            *(Input(name, name != "input_ids", name == "workspace") for name in CALL_INPUTS),
            *(Input(name, True) for name in weight_names(layers)),
        ),
        attributes=(
            Attribute("num_heads", int, 1), Attribute("head_dim", int, 1), Attribute("pre_ln", bool, False),
            Attribute("activation", str), Attribute("epsilon", float, 1e-12), Attribute("weight_layout", str, "out_in"),
            Attribute("padding_id", int), Attribute("pooling", str), Attribute("normalize", bool, False),
            Attribute("max_seqlen", int), Attribute("folded", bool, False),
        ),
        outputs=("out",),
        check=_check,
        infer=_infer,
        plan=functools.partial(_plan, layers),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# rules


def _check(problem: Problem) -> None:
    ids = problem["input_ids"]
    if problem.attribute("pooling") not in POOLINGS:
        known = ", ".join(repr(name) for name in POOLINGS if name)
        problem.reject(f"pooling is {problem.attribute('pooling')!r}", f"pooling {known} or None")
    if ids.dtype not in _IDS:
        problem.reject_type(f"input_ids is {ids.dtype}", "input_ids of int32 or int64")
    packed = problem.get("cu_seqlens") is not None
    axes = "tokens" if packed else "batch, seq"
    if ids.ndim != (1 if packed else 2):
        problem.reject(f"input_ids has shape {ids.shape}", f"input_ids of shape [{axes}]")
        return
    if problem.attribute("pooling") and ids.shape[-1] == 0:
        problem.reject(f"input_ids has shape {ids.shape}: nothing to pool", "a token or more a sequence")
    _check_packed(problem)
    _check_padding(problem, ids)
    for name in ("token_type_ids", "position_ids"):
        tensor = problem.get(name)
        if tensor is None:
            continue
        if tensor.dtype not in _IDS:
            problem.reject_type(f"{name} is {tensor.dtype}", f"{name} of int32 or int64")
        if tensor.shape not in (ids.shape, ids.shape[-1:] if name == "position_ids" else ids.shape):
            problem.reject(
                f"{name} has shape {tensor.shape}, input_ids has shape {ids.shape}",
                f"{name} of shape {ids.shape}",
            )
    if problem.get("token_type_ids") is not None and problem.get("types") is None:
        problem.reject("token_type_ids is given, but the model has no token types", "no token_type_ids")
    _check_length(problem, ids)


def _check_packed(problem: Problem) -> None:
    offsets, longest = problem.get("cu_seqlens"), problem.attribute("max_seqlen")
    if longest is not None and longest < 0:
        problem.reject(f"max_seqlen is {longest}", "max_seqlen of at least 0, or None")
    if offsets is None:
        return
    if offsets.dtype not in LENGTH_TYPES:
        problem.reject_type(f"cu_seqlens is {offsets.dtype}", "cu_seqlens of int32 or int64")
    if offsets.ndim != 1 or offsets.shape[0] < 2:
        problem.reject(
            f"cu_seqlens has shape {offsets.shape}",
            "cu_seqlens of shape (batch + 1,), for a sequence or more",
        )
    for name in ("attention_mask", "lengths"):
        if problem.get(name) is not None:
            problem.reject(f"{name} and cu_seqlens are both given", "packed sequences without padding")


def _check_padding(problem: Problem, ids: Operand) -> None:
    mask, lengths = problem.get("attention_mask"), problem.get("lengths")
    if problem.get("cu_seqlens") is not None:
        return
    if mask is not None and lengths is not None:
        problem.reject("attention_mask and lengths are both given", "one of the two")
    if mask is not None:
        if mask.shape != ids.shape:
            problem.reject(
                f"attention_mask has shape {mask.shape}, input_ids has shape {ids.shape}",
                f"attention_mask of shape {ids.shape}",
            )
        if mask.dtype not in MASK_TYPES:
            problem.reject_type(
                f"attention_mask is {mask.dtype}", "attention_mask of bool, uint8, int8, int32 or int64"
            )
    if lengths is not None:
        if lengths.shape != ids.shape[:1]:
            problem.reject(
                f"lengths has shape {lengths.shape}, input_ids has shape {ids.shape}",
                f"lengths of shape {ids.shape[:1]}",
            )
        if lengths.dtype not in LENGTH_TYPES:
            problem.reject_type(f"lengths is {lengths.dtype}", "lengths of int32 or int64")


def _check_length(problem: Problem, ids: Operand) -> None:
    """The sequence must not be longer than the position table serves; the workspace must be large enough."""
    padding_id, rows = problem.attribute("padding_id"), problem["positions"].shape[0]
    longest = rows - (0 if padding_id is None else padding_id + 1)
    counts = problem.get("position_ids") is None and problem.get("cu_seqlens") is None
    if counts and ids.shape[1] > longest:
        problem.reject(
            f"input_ids has {ids.shape[1]} tokens a sequence, the model has positions for {longest}",
            "shorter sequences, or position_ids",
        )
    workspace = problem.get("workspace")
    if workspace is not None and not problem.violations:
        needed = model_memory(problem).nbytes
        if workspace.dtype != dtypes.u8:
            problem.reject_type(f"workspace is {workspace.dtype}", "workspace of uint8")
        if workspace.ndim != 1 or not workspace.is_contiguous():
            problem.reject(f"workspace has shape {workspace.shape}", "workspace of one dense axis")
        elif workspace.shape[0] < needed or workspace.alignment < 16:
            problem.reject(
                f"workspace has {workspace.shape[0]} bytes, aligned to {workspace.alignment}",
                f"workspace of {needed} bytes (workspace_nbytes), aligned to 16",
            )


def _infer(problem: Problem) -> Mapping[str, OutputSpec]:
    ids, offsets, words = problem["input_ids"], problem.get("cu_seqlens"), problem["words"]
    rows = ids.shape
    if problem.attribute("pooling") is not None:
        rows = (ids.shape[0] if offsets is None else offsets.shape[0] - 1,)
    return {"out": OutputSpec((*rows, words.shape[1]), words.dtype)}


# ---------------------------------------------------------------------------------------------------------------------
# plan


class Memory(NamedTuple):
    """Byte offsets in the workspace, and its size.  hidden is read only where a pooled vector is the result."""

    scratch: int
    attended: int
    statistics: int
    hidden: int
    mask: int
    positions: int
    nbytes: int


def _as_batch(tensor: Operand) -> Operand:
    """Packed ids as a batch of one, packed hidden states likewise."""
    return tensor.view((1, *tensor.shape), (0, *tensor.strides))


def _ids(problem: Problem) -> Operand:
    """input_ids as [batch, seq]."""
    ids = problem["input_ids"]
    return ids if ids.ndim == 2 else _as_batch(ids)


def _front(problem: Problem, number: int, w: str, gamma: str) -> FusedNorm | None:
    """The norm inside a block's products: of pre-LN in the weights themselves, of post-LN in some besides.

    w: "wq" or "w1", of the layer.  gamma: of a post-LN model, the norm's weight.
    """
    layer, bias, last_bias = f"layers.{number}.", "b" + w[1], "bo" if w == "wq" else "b2"
    if problem.attribute("folded"):
        return FusedNorm(problem[layer + w], problem.get(layer + bias))
    fused = f"{layer}fused_"
    if problem.get(fused + w) is None:
        return None
    return FusedNorm(
        problem[fused + w], problem.get(fused + bias), problem.get(gamma), problem.get(fused + last_bias)
    )


def _blocks(problem: Problem, number: int, mask: Operand | None) -> tuple[AttentionBlock, FeedForward]:
    """One layer."""
    get, attribute, prefix = problem.get, problem.attribute, f"layers.{number}."
    weight = {name: get(prefix + name) for name in LAYER_VECTORS}
    options = {name: attribute(name) for name in ("pre_ln", "epsilon", "weight_layout")}
    heads, offsets = attribute("num_heads"), get("cu_seqlens")
    packed = None
    if offsets is not None:
        packed = packed_sequences(offsets, problem["input_ids"].shape[0], attribute("max_seqlen"))
    attention = AttentionBlock(
        problem[prefix + "wq"], get(prefix + "wk"), get(prefix + "wv"), problem[prefix + "wo"],
        gamma=weight["attention_gamma"], beta=weight["attention_beta"], bq=weight["bq"], bk=weight["bk"],
        bv=weight["bv"], bo=weight["bo"], mask=mask, num_heads=heads, head_dim=attribute("head_dim"),
        num_kv_heads=heads, causal=False, residual=True, scale=None, packed=packed,
        front=_front(problem, number, "wq", f"layers.{number - 1}.output_gamma"), **options,
    )  # fmt: skip
    feed_forward = FeedForward(
        problem[prefix + "w1"], problem[prefix + "w2"], weight["b1"], weight["b2"], weight["output_gamma"],
        weight["output_beta"], attribute("activation"),
        front=_front(problem, number, "w1", f"{prefix}attention_gamma"), **options,
    )  # fmt: skip
    return attention, feed_forward


def model_memory(problem: Problem) -> Memory:
    """Where the temporary tensors of a forward pass lie: the size does not depend on the number of layers."""
    batch, seq = _ids(problem).shape
    words = problem["words"]
    x = dense("x", (batch, seq, words.shape[1]), words.dtype)
    scratch = 0
    if problem.get("layers.0.wq") is not None:
        attention, feed_forward = _blocks(problem, 0, None)
        scratch = layer_scratch(x, attention, feed_forward)
    prepared = problem.attribute("folded") or problem.get("layers.0.fused_w1") is not None
    statistics = statistics_nbytes(x) if prepared else 0
    hidden = x.nbytes if problem.attribute("pooling") else 0
    sizes = (scratch, x.nbytes, statistics, hidden, batch * seq, 4 * batch * seq)
    offsets = [0]
    for nbytes in sizes:
        offsets.append(offsets[-1] + aligned(nbytes))
    return Memory(*offsets)


def _plan(layers: int, problem: Problem, outputs: Mapping[str, Operand], device: DeviceInfo) -> Plan:
    ids, words, out = _ids(problem), problem["words"], outputs["out"]
    batch, seq = ids.shape
    shape = (batch, seq, words.shape[1])
    memory, given = model_memory(problem), problem.get("workspace")
    alignment = 256 if given is None else given.alignment
    base = 0 if given is None else given.offset
    place = functools.partial(dense, "workspace", alignment=alignment)

    pooling, pre_ln, epsilon = (problem.attribute(name) for name in ("pooling", "pre_ln", "epsilon"))
    attended = place(shape, words.dtype, offset=base + memory.attended)
    # Every layer reads and writes the same tensor: the result itself, unless that is a pooled vector.
    result = _as_batch(out) if out.ndim == 2 and pooling is None else out
    x = result if pooling is None else place(shape, words.dtype, offset=base + memory.hidden)
    scratch = place((memory.attended,), dtypes.u8, offset=base + memory.scratch)
    mask, steps = _plan_mask(problem, place((batch, seq), dtypes.u8, offset=base + memory.mask))
    positions, counting = _plan_positions(
        problem, place((batch, seq), dtypes.i32, offset=base + memory.positions)
    )
    steps += counting
    steps += plan_embed_tokens(
        ids, words, x, device, position_table=problem["positions"], token_type_ids=problem.get("token_type_ids"),
        type_table=problem.get("types"), positions=positions,
    )  # fmt: skip
    steps += _plan_norm(problem, "embedding", x, device, epsilon)
    blocks = [_blocks(problem, number, mask) for number in range(layers)]
    rows_room = place((memory.hidden - memory.statistics,), dtypes.u8, offset=base + memory.statistics)
    steps += plan_layers(x, blocks, x, attended, scratch, layer_statistics(x, rows_room), device)
    if pre_ln:
        steps += _plan_norm(problem, "final", x, device, epsilon)
    if pooling is not None:
        steps += _plan_pooling(problem, x, mask, out, device, scratch)
    room = () if given is not None else (("workspace", memory.nbytes),)
    return Plan(steps, (*room, *workspace_of(steps)))


def _plan_mask(problem: Problem, room: Operand) -> tuple[Operand | None, tuple[Step, ...]]:
    """The padding mask as the layers read it.  A mask of bytes is used as it is; others are converted into `room`."""
    mask, lengths = problem.get("attention_mask"), problem.get("lengths")
    if mask is not None and mask.dtype in (dtypes.bool_, dtypes.u8):
        return mask, ()
    source = lengths if mask is None else mask
    if source is None:
        return None, ()
    return room, plan_padding_mask(source, room)


def _plan_positions(problem: Problem, room: Operand) -> tuple[Operand | None, tuple[Step, ...]]:
    given, offsets = problem.get("position_ids"), problem.get("cu_seqlens")
    padding_id = problem.attribute("padding_id")
    if given is not None or (padding_id is None and offsets is None):
        return given, ()
    return room, plan_token_positions(_ids(problem), room, padding_id, offsets)


def _plan_norm(
    problem: Problem, name: str, x: Operand, device: DeviceInfo, epsilon: float
) -> tuple[Step, ...]:
    """A layer norm in place, if the model has one of that name."""
    gamma = problem.get(f"{name}_gamma")
    if gamma is None:
        return ()
    return plan_layer_norm(x, gamma, problem.get(f"{name}_beta"), x, device, eps=epsilon)


def _plan_pooling(
    problem: Problem, x: Operand, mask: Operand | None, out: Operand, device: DeviceInfo, scratch: Operand
) -> tuple[Step, ...]:
    """The pooled vector into `out`.  scratch: memory that the layers are done with."""
    batch, _, width = x.shape
    normalize, first_only = problem.attribute("normalize"), problem.attribute("pooling") == "first"
    offsets = problem.get("cu_seqlens")
    if offsets is not None:
        return plan_mean_pool(
            x, offsets, out, device, normalize=normalize, packed=True, first_only=first_only
        )
    steps: tuple[Step, ...] = ()
    if first_only:
        x, mask = x.view((batch, 1, width), x.strides), None
    if mask is None:
        mask = dense(scratch.slot, x.shape[:2], dtypes.u8, offset=scratch.offset, alignment=scratch.alignment)
        steps = plan_padding_mask(None, mask)
    return steps + plan_mean_pool(x, mask, out, device, normalize=normalize)
