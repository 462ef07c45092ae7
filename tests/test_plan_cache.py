"""The way of a call (`cki.ops.call`, `cki.ops.bind`, `cki.ops.held`): checks, remembered plans, outputs, workspaces."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

import cki
from cki import cache
from cki.errors import CkiError, DeviceError, InvalidArgumentError, InvalidTypeError
from cki.ops import call as call_module
from tests.conftest import DeviceUnderTest
from tests.toy import AFFINE, affine

X = np.arange(1000, dtype=np.float32).reshape(8, 125)


def test_result_and_workspace(device: DeviceUnderTest) -> None:
    got = affine(device.array(X), factor=2.0, offset=1.0)
    np.testing.assert_array_equal(device.numpy(got), 4.0 * X + 3.0)


def test_same_problem_is_planned_once(device: DeviceUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    x = device.array(X[:4])
    affine(x, factor=5.0)
    monkeypatch.setattr(call_module, "bind", lambda *_: pytest.fail("planned again"))
    first, second = affine(x, factor=5.0), affine(x, factor=5.0)
    np.testing.assert_array_equal(device.numpy(first), 25.0 * X[:4])
    np.testing.assert_array_equal(device.numpy(second), 25.0 * X[:4])


@pytest.mark.parametrize(
    ("good", "equal", "message"),
    [
        ({"causal": True}, {"causal": 1}, "causal is 1"),
        ({"causal": True}, {"causal": 1.0}, "causal is 1.0"),
        ({"window": (0, 1)}, {"window": (0.0, 1)}, "window"),
        ({"softcap": 1.0}, {"softcap": True}, "softcap is True"),
    ],
)
def test_an_attribute_of_a_wrong_type_is_refused_after_an_equal_right_one(good, equal, message):
    """True == 1 == 1.0 in Python: what was remembered under one must not serve another."""
    q = np.ones((1, 3, 1, 8), np.float32)
    with cki.device("sim"):
        for _ in range(3):
            cki.attention(q, q, q, **good)
            with pytest.raises(CkiError, match=message):
                cki.attention(q, q, q, **equal)


def test_new_shape_compiles_nothing(device: DeviceUnderTest) -> None:
    affine(device.array(X))
    before = cache.statistics().compiled
    for rows in (1, 2, 3, 5):
        affine(device.array(X[:rows]))
    assert cache.statistics().compiled == before


def test_out_is_returned_and_written(device: DeviceUnderTest) -> None:
    x, out = device.array(X), device.empty(X.shape, np.float32)
    assert affine(x, factor=3.0, steps=1, out=out) is out
    np.testing.assert_array_equal(device.numpy(out), 3.0 * X)


def test_in_place_where_the_operation_allows_it(device: DeviceUnderTest) -> None:
    x = device.array(X)
    affine(x, factor=3.0, steps=1, out=x)
    np.testing.assert_array_equal(device.numpy(x), 3.0 * X)


def test_empty_batch_returns_empty(device: DeviceUnderTest) -> None:
    got = affine(device.array(X[:0]))
    assert got.shape == (0, 125)
    assert got.dtype == np.float32


def test_two_threads_get_their_own_results(device: DeviceUnderTest) -> None:
    inputs = [device.array(X + i) for i in range(4)]
    device.synchronize()
    failures: list[str] = []

    def work(index: int) -> None:
        with cki.device(device.kind):
            for _ in range(30):
                got = device.numpy(affine(inputs[index], factor=2.0, offset=index))
                if not np.array_equal(got, 4.0 * (X + index) + 3.0 * index):
                    failures.append(f"thread {index}")

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def refused(kind: type[CkiError], **kwargs: object) -> str:
    with pytest.raises(kind) as caught, cki.device("sim"):
        affine(**kwargs)  # type: ignore[arg-type]
    return str(caught.value)


def test_every_broken_rule_is_listed() -> None:
    text = refused(InvalidTypeError, x=X.astype(np.float64).T, other=X, factor=float("nan"), steps=True)
    for rule in (
        "x is f64",
        "x has strides",
        "other has shape",
        "factor is nan",
        "steps is True of type bool",
    ):
        assert rule in text, text
    assert "a contiguous x" in text


@pytest.mark.parametrize(
    "dtype", [np.float64, np.float16, np.int32, np.int64, np.complex64, bool, "S4", ">f4"]
)
def test_a_wrong_dtype_is_a_wrong_type_whatever_else_is_wrong(dtype: object) -> None:
    x = np.zeros((8, 125), dtype)  # type: ignore[call-overload]
    for options in ({}, {"factor": float("nan")}, {"other": X[:3]}):
        assert "x is " in refused(InvalidTypeError, x=x, **options)
    assert "out is " in refused(InvalidTypeError, x=X, out=x)


def test_an_attribute_of_a_wrong_type_or_value() -> None:
    for options in ({"factor": "2"}, {"factor": (1.0,)}, {"steps": 2.5}, {"steps": None}):
        for tensors in ({"x": X}, {"x": X, "other": X[:3]}, {"x": X.astype(np.complex64)}):
            assert f"{next(iter(options))} is" in refused(InvalidTypeError, **tensors, **options)
    for factor in (float("inf"), -1e39, 10**400):
        assert "factor is" in refused(InvalidArgumentError, x=X, factor=factor)


def test_attributes_that_compare_equal() -> None:
    """A number is taken in any type of number, a bool for none, whatever was called before."""
    x = np.arange(7, dtype=np.float32)
    with cki.device("sim"):
        expected = affine(x, factor=1.0)
        for factor in (1, np.float64(1.0), 1.0, 1):
            np.testing.assert_array_equal(affine(x, factor=factor), expected)
            assert "factor is True of type bool" in refused(InvalidTypeError, x=x, factor=True)
        assert not np.array_equal(affine(x, factor=2), expected)


def test_out_of_wrong_shape_and_dtype() -> None:
    text = refused(InvalidTypeError, x=X, out=np.zeros((3, 3)))
    assert "out has shape (3, 3)" in text
    assert "out of shape (8, 125)" in text
    assert "out of dtype f32" in text


def test_read_only_out() -> None:
    out = np.zeros_like(X)
    out.flags.writeable = False
    assert "out is read-only" in refused(InvalidArgumentError, x=X, out=out)


def test_out_that_overlaps_itself() -> None:
    out = np.lib.stride_tricks.as_strided(np.zeros(200, np.float32), X.shape, (4, 4))
    assert "out overlaps itself" in refused(InvalidArgumentError, x=X, out=out)


def test_misaligned_out() -> None:
    memory = np.zeros(4 * X.size + 1, np.uint8)
    out = np.ndarray(X.shape, np.float32, memory, offset=1)
    assert "no multiple of its element size 4" in refused(InvalidArgumentError, x=X, out=out)


def _misaligned(array: np.ndarray) -> np.ndarray:
    memory = np.zeros(array.nbytes + 1, np.uint8)
    copy = np.ndarray(array.shape, array.dtype, memory, offset=1)
    copy[...] = array
    return copy


@pytest.mark.parametrize("call", [
    lambda x: cki.layer_norm(x), lambda x: cki.layer_norm(X, residual=x), lambda x: cki.rms_norm(x),
    lambda x: cki.attention(*[x.reshape(1, 8, 1, 125)] * 3), lambda x: cki.linear(x, X.T),
    lambda x: cki.mean_pool(x.reshape(1, 8, 125), np.ones((1, 8), bool)),
    lambda x: cki.embed_tokens(np.zeros((1, 3), np.int32), x),
    lambda x: cki.merge_states(x, np.zeros(8, np.float32)),
])  # fmt: skip
def test_misaligned_input(call: Callable[[np.ndarray], object]) -> None:
    with pytest.raises(InvalidArgumentError, match="no multiple of its element size 4"), cki.device("sim"):
        call(_misaligned(X))


@pytest.mark.parametrize("factor", [1e300, -1e39, 10**400, float("inf"), np.float64("nan")])
def test_number_beyond_fp32(factor: float) -> None:
    text = refused(InvalidArgumentError, x=X, factor=factor)
    assert "factor is" in text
    assert "not a finite number of fp32" in text
    assert len(text) < 300


@pytest.mark.parametrize("number", [2**63, -(10**40), 10**5000], ids=["2^63", "-10^40", "10^5000"])
def test_integer_beyond_64_bits(number: int) -> None:
    x, w = np.ones((1, 4, 8), np.float32), np.ones((8, 8), np.float32)
    with cki.device("sim"), pytest.raises(InvalidArgumentError) as caught:
        cki.fused_attention(x, w, w, w, w, num_heads=number, head_dim=8)
    assert any(problem.startswith("num_heads is ") for problem in caught.value.problems)
    assert any(problem.endswith("not an integer of 64 bits") for problem in caught.value.problems)
    with (
        cki.device("sim"),
        pytest.raises(InvalidArgumentError, match="not a finite number of fp32|of 64 bits"),
    ):
        cki.layer_norm(x, eps=number * 10**40)
    with cki.device("sim"), pytest.raises(InvalidArgumentError, match="num_heads is 65537"):
        cki.fused_attention(x, w, w, w, w, num_heads=65537, head_dim=8)


@pytest.mark.parametrize("factor", [5e-324, -1e-46, 1e-39, np.float64(1.17e-38)])
def test_number_that_is_almost_nothing(factor: float) -> None:
    """A kernel would compute with 0, or with few of its bits."""
    assert f"factor is {factor!r}, which fp32 does not hold; 0, or 1.18e-38 or more" in refused(
        InvalidArgumentError, x=X, factor=factor
    )
    with (
        cki.device("sim"),
        pytest.raises(InvalidArgumentError, match="eps is 1e-46, which fp32 does not hold"),
    ):
        cki.layer_norm(np.ones((2, 8), np.float32), eps=1e-46)


def test_numpy_numbers_for_attributes() -> None:
    q = np.random.default_rng(0).normal(size=(1, 6, 1, 8)).astype(np.float32)
    with cki.device("sim"):
        got = cki.attention(
            q, q, q, window=(np.int64(2), np.int32(0)), scale=np.float32(0.5), causal=np.bool_(True)
        )  # type: ignore[arg-type]
        np.testing.assert_array_equal(got, cki.attention(q, q, q, window=(2, 0), scale=0.5, causal=True))


def test_out_shifted_over_an_input() -> None:
    memory = np.zeros(9 * 125, np.float32)
    x, out = memory[: 8 * 125].reshape(8, 125), memory[125:].reshape(8, 125)
    assert "out shares memory with x" in refused(InvalidArgumentError, x=x, out=out)


def test_out_interleaved_with_an_input_shares_nothing() -> None:
    memory = np.zeros((8, 250), np.float32)
    other, out = memory[:, :125], memory[:, 125:]
    with cki.device("sim"):
        from cki.adapter import adapter_of
        from cki.ops.overlap import overlap_rule

        views = adapter_of(out).view(out), adapter_of(other).view(other)
        rule = overlap_rule(("out", "other"), (0, 1), views, False)
    assert not rule.broken([views[0].ptr, views[1].ptr])
    assert rule.broken([views[0].ptr, views[0].ptr])


def test_missing_tensor() -> None:
    assert "x is None" in refused(InvalidTypeError, x=None)


@pytest.mark.parametrize("bad", [[1.0, 2.0], 3.0, "text"])
def test_what_is_no_tensor(bad: object) -> None:
    assert f"x is of type {type(bad).__name__}" in refused(InvalidTypeError, x=bad)


@pytest.mark.parametrize("dtype", [np.complex64, "U3"])
def test_dtype_without_kernels(dtype: object) -> None:
    assert "which has no kernels" in refused(InvalidTypeError, x=np.zeros(3, dtype))  # type: ignore[call-overload]


def test_mixed_frameworks() -> None:
    torch = pytest.importorskip("torch")
    text = refused(InvalidTypeError, x=X, other=torch.zeros(8, 125))
    assert "x is of numpy" in text
    assert "other is of torch" in text


def test_tensor_that_requires_grad() -> None:
    torch = pytest.importorskip("torch")
    x = torch.zeros(4, 4, requires_grad=True)
    assert "torch.no_grad" in refused(InvalidTypeError, x=x)
    with torch.no_grad(), cki.device("sim"):
        assert affine(x).shape == (4, 4)
    assert "torch.no_grad" in refused(InvalidTypeError, x=x)


def test_cpu_tensor_on_the_cuda_device() -> None:
    with pytest.raises(DeviceError) as caught, cki.device("cuda"):
        affine(X)
    text = str(caught.value)
    assert "x lies in memory of device cpu" in text
    assert 'with cki.device("sim")' in text


@pytest.mark.gpu
def test_gpu_tensor_on_the_simulated_device(device: DeviceUnderTest) -> None:
    if device.kind == "sim":
        pytest.skip("needs a GPU tensor")
    with pytest.raises(DeviceError, match="cuda:0"), cki.device("sim"):
        affine(device.array(X))


def test_errors_come_again_after_a_success(device: DeviceUnderTest) -> None:
    x = device.array(X)
    affine(x, factor=1.5)
    with pytest.raises(InvalidArgumentError):
        affine(x, factor=float("nan"))


def test_arrays_for_attributes_after_a_success() -> None:
    """They compare to no single truth with the attributes of the remembered call."""
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(X)
    with cki.device("sim"):
        affine(x, factor=2.0)
        for bad in (np.ones(2), torch.ones(2)):
            with pytest.raises(
                InvalidTypeError, match=rf"factor is .* of type {type(bad).__name__}, not float"
            ):
                affine(x, factor=bad)


def test_list_for_a_tuple_attribute_is_remembered() -> None:
    x = np.zeros((1, 2, 1, 8), np.float32)
    with cki.device("sim"):
        for _ in range(2):
            assert cki.attention(x, x, x, window=[1, 0]).shape == x.shape  # type: ignore[arg-type]


def test_held_plan(device: DeviceUnderTest) -> None:
    x, out = device.array(X), device.empty(X.shape, np.float32)
    held = cki.hold(affine, x, factor=2.0, offset=1.0, out=out)
    assert np.isnan(device.numpy(out)).all(), "hold launched something"
    assert held(x, out=out) is out
    np.testing.assert_array_equal(device.numpy(out), 4.0 * X + 3.0)
    free = cki.hold(affine, x, factor=2.0)
    np.testing.assert_array_equal(device.numpy(free(x)), 4.0 * X)


def test_held_plan_checks_shape_dtype_and_count(device: DeviceUnderTest) -> None:
    x = device.array(X)
    held = cki.hold(affine, x)
    for bad in (device.array(X[:4]), device.array(X.astype(np.float64)), device.array(X.T.copy()).T):
        with pytest.raises(InvalidArgumentError, match="x is "):
            held(bad)
    with pytest.raises(InvalidArgumentError, match="1 inputs and 0 outputs"):
        held(x, x)


def test_hold_refuses_what_is_no_operation() -> None:
    with pytest.raises(InvalidArgumentError, match="no single operation"):
        cki.hold(lambda x, stream: x, X)
    for function in (np.sum, None, lambda x: x):
        with pytest.raises(InvalidTypeError, match="takes no stream="):
            cki.hold(function, X)  # type: ignore[arg-type]


def test_entries_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_module, "_ENTRY_LIMIT", 8)
    monkeypatch.setattr(call_module, "_entries", {})
    with cki.device("sim"):
        for rows in range(1, 30):
            affine(np.zeros((rows, 4), np.float32), steps=1)
    assert len(call_module._entries) <= 8


def test_spec_describes_itself() -> None:
    assert call_module.tensor_names(AFFINE) == ["x", "other", "out"]
