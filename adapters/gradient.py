"""What operations compute, written in plain, differentiable operations of whichever framework.

CKI's kernels have no backward pass.  A call with `recompute_gradient=True` runs the kernel, and for its gradient
computes the expression here, which the framework differentiates: nothing but the inputs is kept until then.  The Keras
layers train on the same expressions.

Expressions are written once, over the few functions of `Arrays`, which each framework gives (`gradient_torch`,
`gradient_jax`, `gradient_tensorflow`), and the operators of its arrays.  Products are computed in the inputs' type;
norms, softmax and activations in fp32 (fp64 for fp64).  What masks hide must be finite: an expression multiplies by
zero what a kernel does not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from cki.errors import InvalidTypeError, UnsupportedError
from cki.ops.table import public_specs

Inputs = Mapping[str, Any]
Attributes = Mapping[str, Any]


class Arrays(Protocol):
    """A framework's functions, by NumPy's names and meanings where NumPy has them."""

    matmul: Callable[[Any, Any], Any]
    exp: Callable[[Any], Any]
    log: Callable[[Any], Any]
    tanh: Callable[[Any], Any]
    erf: Callable[[Any], Any]
    rsqrt: Callable[[Any], Any]
    cos: Callable[[Any], Any]
    sin: Callable[[Any], Any]
    sigmoid: Callable[[Any], Any]
    abs: Callable[[Any], Any]
    where: Callable[[Any, Any, Any], Any]
    maximum: Callable[[Any, Any], Any]
    reshape: Callable[[Any, Any], Any]
    transpose: Callable[[Any, Any], Any]
    concatenate: Callable[[Any], Any]  # along the last axis
    stack: Callable[[Any], Any]  # along a new last axis
    constant: Callable[[Any], Any]  # of what is not to be differentiated
    take: Callable[[Any, Any], Any]  # rows of a table

    def mean(self, x: Any) -> Any:
        """Over the last axis, which stays with extent 1; `sum` and `max` likewise."""

    def sum(self, x: Any) -> Any: ...

    def max(self, x: Any) -> Any: ...

    def shape(self, x: Any) -> tuple[Any, ...]:
        """Extents: integers, and scalars of the framework where it does not know them yet."""

    def arange(self, count: Any, like: Any) -> Any:
        """0, 1, ... as integers on the device of `like`."""

    def wide(self, x: Any) -> Any:
        """In fp32, or fp64 where x is that."""

    def widest(self, x: Any) -> Any:
        """In fp64, where the framework has it, else fp32."""

    def like(self, x: Any, other: Any) -> Any:
        """In the type of `other`."""

    def as_bool(self, x: Any) -> Any:
        """Whether elements are not 0."""


class CommonArrays:
    """What arrays with NumPy's indexing and comparison share of `Arrays`."""

    @staticmethod
    def take(table: Any, rows: Any) -> Any:
        return table[rows]

    @staticmethod
    def shape(x: Any) -> tuple[Any, ...]:
        return tuple(x.shape)

    @staticmethod
    def as_bool(x: Any) -> Any:
        return x != 0


Expression = Callable[[Arrays, Inputs, Attributes], tuple[Any, ...]]


def _all() -> dict[str, Expression]:
    # Imported here: the modules of expressions import this one.
    from cki.adapters.gradient_attention import EXPRESSIONS as OF_ATTENTION
    from cki.adapters.gradient_rows import EXPRESSIONS as OF_ROWS

    return {**OF_ROWS, **OF_ATTENTION}


def names() -> frozenset[str]:
    """The operations that have an expression."""
    return frozenset(_all())


def expression(name: str) -> Expression:
    """The expression of an operation: (arrays, inputs by name, attributes by name) -> its outputs, in its order.

    Raises UnsupportedError, naming the operation, where there is none.
    """
    found = _all().get(name)
    if found is None:
        raise UnsupportedError(
            f"{name}: recompute_gradient=True, but it has no differentiable expression",
            hint=f"of {', '.join(sorted(names()))}, or the same in plain operations of the framework",
        )
    return found


def require_bool(name: str, recompute_gradient: Any) -> None:
    """InvalidTypeError for a recompute_gradient that is neither True nor False."""
    if not isinstance(recompute_gradient, (bool, np.bool_)):
        raise InvalidTypeError(
            f"{name}: recompute_gradient is {recompute_gradient!r}",
            hint="recompute_gradient of True or False",
        )


def refusal(name: str, framework: str, hint: str = "") -> UnsupportedError:
    """The error of a call without `recompute_gradient=True` that a gradient reaches.

    framework: the module of `cki.adapters` that has the function with that argument.
    """
    ask = "a custom gradient of the framework's around it"  # of a user's own operation
    if name in public_specs():
        ask = "the same in plain operations of the framework"
    if name in names():
        ask = f"cki.adapters.{framework}.{name}(..., recompute_gradient=True) differentiates the plain expression"
    return UnsupportedError(
        f"{name} has no gradient: CKI is for inference, and differentiation reached cki.{name}",
        hint=f"{ask}; {hint}" if hint else ask,
    )
