"""The cache argument of `append_kv` and `paged_attention`: its forms, its rules, and its import into a framework."""

from __future__ import annotations

from importlib import import_module
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from cki import dtypes
from cki.errors import InvalidTypeError
from cki.memory.views import CacheTensor
from cki.ops.spec import Problem

#: Where frameworks keep `from_dlpack`, by the package that the type of their tensors is of.
_IMPORTERS = {"cupy": "cupy", "torch": "torch", "jax": "jax.dlpack", "jaxlib": "jax.dlpack"}

# JAX arrays over a cache's memory, by identity.  Other JAX arrays must never be written to.
_jax_views: WeakValueDictionary[int, Any] = WeakValueDictionary()

CACHE_DTYPES = (dtypes.f32, dtypes.f16, dtypes.bf16, dtypes.e4m3)


def cache_tensors(operation: str, cache: Any) -> tuple[Any, Any, Any, Any]:
    """(k_cache, v_cache, k_scale, v_scale) of a CacheLayer or a tuple of two or four; scales may be None."""
    if not isinstance(cache, (tuple, list)) or len(cache) not in (2, 4):
        raise InvalidTypeError(
            f"{operation}: the cache is a {type(cache).__name__}",
            hint="a layer of a PagedKVCache, (k_cache, v_cache) or (k_cache, v_cache, k_scale, v_scale)",
        )
    return tuple(cache) if len(cache) == 4 else (*cache, None, None)


def imported(tensors: tuple[Any, ...], like: Any) -> list[Any]:
    """Tensors of a cache as tensors of `like`'s framework, over the same memory; others as they are."""
    return [_import(tensor, like) if isinstance(tensor, CacheTensor) else tensor for tensor in tensors]


def is_cache_memory(array: Any) -> bool:
    """Whether a JAX array is an imported tensor of a cache, whose memory the cache's owner lets operations write."""
    return _jax_views.get(id(array)) is array


def _import(tensor: CacheTensor, like: Any) -> Any:
    if isinstance(like, np.ndarray):
        return tensor.numpy()  # the memory itself: NumPy arrays are the simulated device's
    if isinstance(like, CacheTensor):
        return tensor
    packages = (base.__module__.partition(".")[0] for base in type(like).__mro__)
    home = next((_IMPORTERS[package] for package in packages if package in _IMPORTERS), None)
    if home is None:
        # Read by its DLPack, as others of no framework; beside TensorFlow's tensors the call says that they mix.
        return tensor
    try:
        found = import_module(home).from_dlpack(tensor)
        if home == "jax.dlpack":
            _jax_views[id(found)] = found
        return found
    except TypeError as error:
        raise InvalidTypeError(
            f"a cache of {tensor.dtype} beside arrays of {home}, which has none of this type",
            hint="tensors of torch or JAX",
        ) from error


def check_cache(problem: Problem, kv_heads: int, head_dim: int, value_dim: int | None) -> None:
    """Rules of k_cache, v_cache, k_scale and v_scale.  value_dim: None takes v_cache's own."""
    k_cache, v_cache = problem["k_cache"], problem["v_cache"]
    shaped = True
    for name, cache, dim in (("k_cache", k_cache, head_dim), ("v_cache", v_cache, value_dim)):
        if cache.dtype not in CACHE_DTYPES:
            problem.reject_type(f"{name} is {cache.dtype}", "caches of f32, f16, bf16 or e4m3")
        if cache.ndim != 4 or cache.shape[1] == 0:
            shaped = False
            problem.reject(
                f"{name} has shape {cache.shape}", f"{name} of shape [blocks, block_size, kv_heads, head_dim]"
            )
            continue
        if cache.shape[2] != kv_heads:
            problem.reject(
                f"{name} has {cache.shape[2]} heads, not {kv_heads}", f"a cache of {kv_heads} heads"
            )
        if dim is not None and cache.shape[3] != dim:
            problem.reject(f"{name} has head_dim {cache.shape[3]}, not {dim}", f"{name} of head_dim {dim}")
    if k_cache.dtype != v_cache.dtype:
        problem.reject_type(f"k_cache is {k_cache.dtype}, v_cache is {v_cache.dtype}", "caches of one dtype")
    if shaped and k_cache.shape[:2] != v_cache.shape[:2]:
        problem.reject(
            f"k_cache holds {k_cache.shape[:2]} blocks and places, v_cache {v_cache.shape[:2]}",
            "caches with the same blocks",
        )
    if shaped:
        _check_scales(problem, k_cache.shape[:3])


def _check_scales(problem: Problem, slots: tuple[int, ...]) -> None:
    scales = {name: problem.get(name) for name in ("k_scale", "v_scale")}
    present = [scale for scale in scales.values() if scale is not None]
    wanted = f"k_scale and v_scale of shape {slots} (dense), or of shape {slots[2:]}"
    fp8 = problem["k_cache"].dtype == dtypes.e4m3
    if fp8 and len(present) < 2:
        problem.reject("an e4m3 cache without its scales", wanted)
    if not fp8 and present:
        problem.reject(
            f"scales are given, but k_cache is {problem['k_cache'].dtype}", "scales with e4m3 caches only"
        )
    for name, scale in scales.items():
        if scale is None:
            continue
        if scale.dtype != dtypes.f32:
            problem.reject_type(f"{name} is {scale.dtype}", f"{name} of f32")
        if scale.shape not in (slots, slots[2:]) or not scale.is_contiguous():
            problem.reject(f"{name} has shape {scale.shape} and strides {scale.strides}", wanted)
    if len(present) == 2 and present[0].ndim != present[1].ndim:
        problem.reject("one of k_scale and v_scale is of tokens, the other of heads", wanted)
