"""Host cost of a call in each framework: fused attention and layer norm beside the framework's own small operation.

    python bench/host_cost.py [--framework tensorflow ...]

The tensors are small (2 x 16 tokens of width 1024, bf16), so that the device is never what is waited for: the time is
what Python, the framework, CKI and the driver take to enqueue a call.  "small op" is a multiplication by two in the
same mode.  `limit_us` is the project's budget: 10 us for a call in eager PyTorch; in TensorFlow, above the small op,
45 us in eager mode and 100 us in a tf.function.  Frameworks that are not installed, or see no GPU, are named and left
out.  Method: that of bench/launch_cost.py, loops of 50 calls, the queue drained before each, all cases in turn
(bench/common.py, `host_times`); `python_call_us` is an empty call of Python's, by which hosts can be compared.  Every
result is compared with float64 before and after it is timed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import common
import numpy as np

import cki
from cki import reference

BATCH, TOKENS, WIDTH, HEADS = 2, 16, 1024, 16
#: All frameworks of one process share the GPU.
_SETTINGS = {
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


class Case(NamedTuple):
    """One call.  limit_us: its budget.  is_above_small: the budget counts from the small op of the same mode."""

    mode: str
    name: str
    call: Callable[[], object]
    limit_us: float | None = None
    is_above_small: bool = False


class Framework(NamedTuple):
    """cases: makes the calls.  read: a tensor of the framework's as a NumPy array in fp32."""

    cases: Callable[[], Iterator[Case]]
    read: Callable[[Any], np.ndarray]


class Absent(Exception):
    """Why a framework cannot be measured here."""


def inputs() -> dict[str, np.ndarray]:
    """Arrays in fp32; every framework makes bf16 tensors of them (CuPy fp16, which it has)."""
    rng = np.random.default_rng(0)
    square = (WIDTH, WIDTH)
    arrays = {name: rng.standard_normal(square, np.float32) / 32 for name in ("wq", "wk", "wv", "wo")}
    x = rng.standard_normal((BATCH, TOKENS, WIDTH), np.float32)
    return {"x": x, **arrays, "gamma": np.ones(WIDTH, np.float32), "beta": np.zeros(WIDTH, np.float32)}


def calls_of(tensors: dict[str, Any]) -> dict[str, Callable[[Any], Any]]:
    """The measured operations as functions of x."""
    weights = [tensors[name] for name in ("wq", "wk", "wv", "wo", "gamma", "beta")]
    gamma, beta = weights[4:]

    def attention(x: Any) -> Any:
        return cki.fused_attention(x, *weights, num_heads=HEADS, head_dim=WIDTH // HEADS)

    def norm(x: Any) -> Any:
        return cki.layer_norm(x, gamma, beta)

    return {"small op": lambda x: x * 2, "cki.fused_attention": attention, "cki.layer_norm": norm}


def in_mode(
    mode: str, tensors: dict[str, Any], wrap: Callable[[Any], Any], limit_us: float | None, is_above: bool
) -> Iterator[Case]:
    """Cases of one mode: each operation wrapped (compiled), on the same x."""
    x = tensors["x"]
    for name, function in calls_of(tensors).items():
        wrapped = wrap(function)
        limit = None if name == "small op" else limit_us
        yield Case(mode, name, lambda wrapped=wrapped: wrapped(x), limit, is_above)  # type: ignore[misc]


def torch_cases() -> Iterator[Case]:
    """Eager PyTorch, and torch.compile."""
    import torch

    if not torch.cuda.is_available():
        raise Absent("it sees no GPU")
    tensors = {name: torch.from_numpy(a).to("cuda", torch.bfloat16) for name, a in inputs().items()}
    yield from in_mode("torch eager", tensors, lambda function: function, 10.0, False)
    yield from in_mode("torch.compile", tensors, lambda f: torch.compile(f, fullgraph=True), None, False)


def jax_cases() -> Iterator[Case]:
    """jax.jit."""
    import jax
    import jax.numpy as jnp

    if jax.default_backend() not in ("gpu", "cuda"):
        raise Absent("it sees no GPU")
    tensors = {name: jnp.asarray(a, jnp.bfloat16) for name, a in inputs().items()}
    yield from in_mode("jax.jit", tensors, jax.jit, None, False)


def tensorflow_cases() -> Iterator[Case]:
    """TensorFlow in eager mode, in a tf.function, and compiled by XLA."""
    import tensorflow as tf

    if not tf.config.list_physical_devices("GPU"):
        raise Absent("it sees no GPU")
    with tf.device("GPU:0"):
        tensors = {name: tf.cast(tf.constant(a), tf.bfloat16) for name, a in inputs().items()}
    yield from in_mode("tf eager", tensors, lambda function: function, 45.0, True)
    yield from in_mode("tf.function", tensors, tf.function, 100.0, True)
    yield from in_mode("tf jit_compile", tensors, lambda f: tf.function(f, jit_compile=True), None, False)


def cupy_cases() -> Iterator[Case]:
    """CuPy."""
    import cupy

    tensors = {name: cupy.asarray(a).astype(cupy.float16) for name, a in inputs().items()}
    yield from in_mode("cupy", tensors, lambda function: function, 10.0, False)


def _read_tensorflow(tensor: Any) -> np.ndarray:
    import tensorflow as tf

    found: np.ndarray = tf.cast(tensor, tf.float32).numpy()
    return found


FRAMEWORKS = {
    "torch": Framework(torch_cases, lambda tensor: tensor.float().cpu().numpy()),
    "jax": Framework(jax_cases, lambda array: np.asarray(array.astype("float32"))),
    "tensorflow": Framework(tensorflow_cases, _read_tensorflow),
    "cupy": Framework(cupy_cases, lambda array: array.astype(np.float32).get()),
}


def require_right(cases: Sequence[Case], read: Callable[[Any], np.ndarray]) -> None:
    """End the program where a call's result is not what the operation is in float64, but for 16-bit rounding."""
    arrays: dict[str, Any] = {name: array.astype(np.float64) for name, array in inputs().items()}
    x, gamma, beta = arrays["x"], arrays["gamma"], arrays["beta"]
    expected = {
        "small op": 2 * x,
        "cki.fused_attention": reference.fused_attention(**arrays, num_heads=HEADS, head_dim=WIDTH // HEADS),
        "cki.layer_norm": reference.layer_norm(x, gamma, beta),
    }
    for case in cases:
        wanted = expected[case.name]
        error = float(np.abs(read(case.call()) - wanted).max() / np.abs(wanted).max())
        if not error <= 0.02:
            raise SystemExit(f"{case.mode}: {case.name}: wrong by {error} of the largest value")


def measure(framework: str) -> list[dict[str, object]]:
    """Rows of one framework."""
    rows, small_us = [], 0.0
    dtype = "f16" if framework == "cupy" else "bf16"
    make, read = FRAMEWORKS[framework]
    cases = list(make())
    require_right(cases, read)
    timings = common.host_times({f"{case.mode}: {case.name}": case.call for case in cases})
    require_right(cases, read)  # as calls are made by now, recognised
    python_us = round(common.python_call_us(), 4)
    for case in cases:
        timing = timings[f"{case.mode}: {case.name}"]
        if case.name == "small op":
            small_us = timing.median_us
        above = timing.median_us - small_us
        spent = above if case.is_above_small else timing.median_us
        rows.append(common.row(
            "host cost", f"batch={BATCH} tokens={TOKENS} width={WIDTH}", dtype, f"{case.mode}: {case.name}", timing,
            version=sys.modules[framework].__version__, above_small_us=round(above, 2),
            limit_us="" if case.limit_us is None else case.limit_us,
            within_limit="" if case.limit_us is None else ("yes" if spent <= case.limit_us else "NO"),
            python_call_us=python_us,
        ))  # fmt: skip
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--framework", choices=tuple(FRAMEWORKS), action="append", help="default: all")
    options = parser.parse_args(argv)
    common.require_gpu()
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    for framework in options.framework or list(FRAMEWORKS):
        try:
            rows = measure(framework)
        except (ImportError, Absent) as error:
            print(f"{framework}: not measured, {error}")
        else:  # one file each: some frameworks want processes, or environments, of their own
            common.write_csv(f"host_cost_{framework}", rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
