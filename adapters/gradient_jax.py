"""Gradients of operations in JAX: calls whose reverse-mode derivative is that of the plain expression
(`cki.adapters.gradient`).

The forward pass is the kernel's call and keeps its inputs alone; the backward pass is `jax.vjp` of the expression, in
the same program.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from cki.adapters import gradient
from cki.ops.spec import OpSpec


class JaxArrays(gradient.CommonArrays):  # type: ignore[misc]
    """`cki.adapters.gradient.Arrays` of JAX."""

    matmul = staticmethod(jnp.matmul)
    exp = staticmethod(jnp.exp)
    log = staticmethod(jnp.log)
    tanh = staticmethod(jnp.tanh)
    erf = staticmethod(jax.lax.erf)
    rsqrt = staticmethod(jax.lax.rsqrt)
    cos = staticmethod(jnp.cos)
    sin = staticmethod(jnp.sin)
    sigmoid = staticmethod(jax.nn.sigmoid)
    abs = staticmethod(jnp.abs)
    where = staticmethod(jnp.where)
    maximum = staticmethod(jnp.maximum)
    reshape = staticmethod(jnp.reshape)
    transpose = staticmethod(jnp.transpose)
    concatenate = staticmethod(functools.partial(jnp.concatenate, axis=-1))
    stack = staticmethod(functools.partial(jnp.stack, axis=-1))
    constant = staticmethod(jax.lax.stop_gradient)
    mean = staticmethod(functools.partial(jnp.mean, axis=-1, keepdims=True))
    sum = staticmethod(functools.partial(jnp.sum, axis=-1, keepdims=True))
    max = staticmethod(functools.partial(jnp.max, axis=-1, keepdims=True))

    @staticmethod
    def arange(count: Any, like: Any) -> Any:
        return jnp.arange(count)

    @staticmethod
    def wide(x: Any) -> Any:
        return x if x.dtype == jnp.float64 else x.astype(jnp.float32)

    @staticmethod
    def widest(x: Any) -> Any:
        return x.astype(jnp.float64 if jax.config.jax_enable_x64 else jnp.float32)

    @staticmethod
    def like(x: Any, other: Any) -> Any:
        return x.astype(other.dtype)


ARRAYS = JaxArrays()


def bind_recomputed(spec: OpSpec, inputs: Sequence[Any], attributes: Sequence[Any]) -> Any:
    """`cki.adapters.jax_ffi.bind` with a gradient."""
    gradient.expression(spec.name)
    results = _call(spec, tuple(attributes), tuple(inputs))
    return results[0] if len(results) == 1 else results


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _call(spec: OpSpec, attributes: tuple[Any, ...], inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    from cki.adapters.jax_ffi import bind

    results = bind(spec, inputs, attributes)
    return results if isinstance(results, tuple) else (results,)


def _forward(spec: OpSpec, attributes: tuple[Any, ...], inputs: tuple[Any, ...]) -> Any:
    return _call(spec, attributes, inputs), inputs


def _backward(spec: OpSpec, attributes: tuple[Any, ...], inputs: tuple[Any, ...], given: Any) -> Any:
    named = dict(zip([attribute.name for attribute in spec.attributes], attributes))
    floats = {
        item.name: tensor
        for item, tensor in zip(spec.inputs, inputs)
        if tensor is not None and jnp.issubdtype(tensor.dtype, jnp.floating)
    }
    fixed = {
        item.name: t for item, t in zip(spec.inputs, inputs) if t is not None and item.name not in floats
    }

    def expression(variables: dict[str, Any]) -> tuple[Any, ...]:
        outputs: tuple[Any, ...] = gradient.expression(spec.name)(ARRAYS, {**variables, **fixed}, named)
        return outputs

    found: dict[str, Any] = jax.vjp(expression, floats)[1](given)[0]
    return (tuple(found.get(item.name) for item in spec.inputs),)


_call.defvjp(_forward, _backward)
