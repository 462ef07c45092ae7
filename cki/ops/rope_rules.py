"""The rules of `append_kv` and `apply_rope`: every one that a call breaks is named."""

from __future__ import annotations

import math
from typing import Any

from cki import dtypes
from cki.errors import InvalidArgumentError
from cki.ops.cache_arguments import CACHE_DTYPES, check_cache
from cki.ops.spec import Problem
from cki.ops.validate import host_values, reads_values, shape_of

MAX_HEAD_DIM = 256
_FLOATS = (dtypes.f32, dtypes.f16, dtypes.bf16)
_INDICES = (dtypes.i32, dtypes.i64)


@reads_values
def validate(slot_mapping: Any, positions: Any, cos_sin: Any, k_cache: Any = None) -> None:
    """CKI_VALIDATE=1: what lies in device memory.

    Tensors of wrong shapes or types are left to the rules.
    """
    problems = []
    num_slots = math.prod(shape_of(k_cache)[:2])
    is_cache = len(shape_of(k_cache)) == 4 and slot_mapping is not None
    slots = host_values(slot_mapping, "slot_mapping") if is_cache else None
    if slots is not None and slots.dtype.kind == "i":
        outside = slots[(slots < -1) | (slots >= num_slots)]
        if outside.size:
            problems.append(f"slot_mapping holds {int(outside[0])}, the cache has {num_slots} slots")
        used = slots[slots >= 0].tolist()
        if len(set(used)) < len(used):
            twice = next(slot for slot in used if used.count(slot) > 1)
            problems.append(f"slot_mapping names slot {twice} more than once")
    if positions is not None and shape_of(cos_sin):
        values = host_values(positions, "positions")
        if values.dtype.kind != "i":
            values = values[:0]  # the rules refuse it
        outside = values[(values < 0) | (values >= cos_sin.shape[0])]
        if outside.size:
            problems.append(f"positions holds {int(outside[0])}, cos_sin has {cos_sin.shape[0]} rows")
    if problems:
        raise InvalidArgumentError(
            "indices outside their tensors",
            problems,
            "slots from -1 to blocks * block_size - 1, each once, and positions of cos_sin",
        )


def _check_heads(problem: Problem, name: str, tokens: int | None = None) -> bool:
    x = problem.get(name)
    if x is None:
        return True
    if x.dtype not in _FLOATS:
        problem.reject_type(f"{name} is {x.dtype}", f"{name} of f32, f16 or bf16")
    if x.ndim != 3:
        problem.reject(f"{name} has shape {x.shape}", f"{name} of shape [tokens, heads, head_dim]")
        return False
    if not 1 <= x.shape[2] <= MAX_HEAD_DIM:
        problem.reject(f"{name} has head_dim {x.shape[2]}", f"a head_dim of 1 to {MAX_HEAD_DIM}")
    if tokens is not None and x.shape[0] != tokens:
        problem.reject(f"{name} has {x.shape[0]} tokens, not {tokens}", "one number of tokens")
    return True


def _check_index(problem: Problem, name: str, tokens: int) -> None:
    index = problem.get(name)
    if index is None:
        return
    if index.shape != (tokens,):
        problem.reject(f"{name} has shape {index.shape}", f"{name} of shape ({tokens},)")


def _check_rotation(problem: Problem, head_dim: int, base_name: str) -> None:
    """Attributes and table of the rotation of heads of `head_dim`."""
    rotary, table, base = (
        problem.attribute("rotary_dim"),
        problem.get("cos_sin"),
        problem.attribute(base_name),
    )
    turned = head_dim if rotary is None else rotary
    if turned % 2 or not 2 <= turned <= head_dim:
        problem.reject(
            f"rotary_dim is {turned}, the head has {head_dim} elements",
            f"an even rotary_dim of 2 to {head_dim}",
        )
    if base is not None and base <= 0:
        problem.reject(f"{base_name} is {base}", f"{base_name} above 0")
    if table is None:
        return
    if table.ndim != 2 or table.shape[1] != turned or (turned > 1 and table.strides[1] != 1):
        problem.reject(
            f"cos_sin has shape {table.shape} and strides {table.strides}",
            f"cos_sin of shape [positions, {turned}], cosines then sines, dense rows",
        )


def _check_norm_weights(problem: Problem, head_dim: int) -> None:
    weights = {name: problem.get(name) for name in ("q_norm_weight", "k_norm_weight")}
    for name, weight in weights.items():
        if weight is None:
            continue
        if weight.shape != (head_dim,):
            problem.reject(f"{name} has shape {weight.shape}", f"{name} of shape ({head_dim},)")
    found = {weight.dtype for weight in weights.values() if weight is not None}
    if len(found) > 1:
        problem.reject_type(
            f"norm weights are of {' and '.join(map(str, found))}", "norm weights of one dtype"
        )
    if weights["q_norm_weight"] is not None and problem.get("q") is None:
        problem.reject("q_norm_weight is given without q", "q")
    if problem.attribute("norm_eps") < 0:
        problem.reject(f"norm_eps is {problem.attribute('norm_eps')}", "norm_eps of 0 or more")


def _check_types(problem: Problem) -> None:
    """Of all but the heads, whose shapes decide whether the rest can be compared at all."""
    problem.require_dtypes(_INDICES, "int32 or int64", "slot_mapping", "positions")
    problem.require_dtypes((dtypes.f32,), "f32", "cos_sin", "k_scale", "v_scale")
    problem.require_dtypes(CACHE_DTYPES, "f32, f16, bf16 or e4m3", "k_cache", "v_cache")
    problem.require_dtypes(_FLOATS, "f32, f16 or bf16", "q_norm_weight", "k_norm_weight")


def check_append(problem: Problem) -> None:
    """Rules of `append_kv`."""
    _check_types(problem)
    k, v, q = problem["k"], problem["v"], problem.get("q")
    if not all([_check_heads(problem, "k"), _check_heads(problem, "v"), _check_heads(problem, "q")]):
        return
    tokens, kv_heads, head_dim = k.shape
    for name, tensor in (("v", v), ("q", q)):
        if tensor is None:
            continue
        if tensor.dtype != k.dtype:
            problem.reject_type(f"{name} is {tensor.dtype}, k is {k.dtype}", "q, k and v of one dtype")
        if tensor.shape[0] != tokens:
            problem.reject(f"{name} has {tensor.shape[0]} tokens, k has {tokens}", "one number of tokens")
    if v.shape[1] != kv_heads:
        problem.reject(f"v has {v.shape[1]} heads, k has {kv_heads}", "k and v with the same heads")
    if q is not None and q.shape[2] != head_dim:
        problem.reject(f"q has head_dim {q.shape[2]}, k has {head_dim}", "q and k of one head_dim")
    check_cache(problem, kv_heads, head_dim, v.shape[2])
    _check_index(problem, "slot_mapping", tokens)
    _check_index(problem, "positions", tokens)
    table, base = problem.get("cos_sin"), problem.attribute("rope_base")
    if table is not None and base is not None:
        problem.reject("both cos_sin and rope_base are given", "one of cos_sin and rope_base")
    if table is not None or base is not None:
        if problem.get("positions") is None:
            problem.reject("a rotation without positions", "positions")
        _check_rotation(problem, head_dim, "rope_base")
    elif problem.attribute("rotary_dim") is not None:
        problem.reject("rotary_dim is given without cos_sin or rope_base", "cos_sin or rope_base")
    _check_norm_weights(problem, head_dim)


def check_apply(problem: Problem) -> None:
    """Rules of `apply_rope`."""
    _check_types(problem)
    if not _check_heads(problem, "x"):
        return
    x = problem["x"]
    _check_index(problem, "positions", x.shape[0])
    _check_rotation(problem, x.shape[2], "base")
