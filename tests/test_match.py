"""Recognising tensors without their key: what a matcher accepts, and that it never accepts what the key tells apart."""

from __future__ import annotations

import dataclasses
import weakref

import numpy as np
import pytest

import cki
from cki.adapter import adapter_of
from cki.errors import InvalidArgumentError
from cki.ops import call as call_module
from cki.ops.match import Guard, matcher
from cki.ops.norm import RMS_NORM

torch = pytest.importorskip("torch")


def torch_matcher(*examples, trusted=False):
    guards = [None if t is None else adapter_of(t).guard(t, trusted) for t in examples]
    given = [t for t in examples if t is not None]
    return matcher(guards, adapter_of(given[0]).likeness(given))


@pytest.mark.torch
def test_the_same_kind_of_tensor_gives_its_addresses():
    x, w = torch.randn(4, 8), torch.randn(8)
    match = torch_matcher(x, w, None)
    assert match((x, w, None)) == [x.data_ptr(), w.data_ptr()]
    other = torch.randn(4, 8)
    assert match((other, w, None)) == [other.data_ptr(), w.data_ptr()]


@pytest.mark.torch
@pytest.mark.parametrize(
    "other",
    [
        lambda x: x[:3], lambda x: x.double(), lambda x: x.t().contiguous().t(), lambda x: None, lambda x: x.numpy(),
        lambda x: x.to_sparse(), lambda x: torch.nn.Parameter(x), lambda x: x.clone().requires_grad_(),
        lambda x: x._neg_view(),
        lambda x: torch.randn(33)[1:].view(4, 8), lambda x: x.to("meta"), lambda x: [1.0],
    ],
)  # fmt: skip
def test_another_kind_is_not_recognised(other):
    x = torch.randn(4, 8)
    assert torch_matcher(x)((other(x),)) is None


@pytest.mark.torch
def test_a_tensor_where_none_was_and_another_number():
    x = torch.randn(4, 8)
    assert torch_matcher(x, None)((x, x)) is None
    assert torch_matcher(x)((x, x)) is None


@pytest.mark.torch
def test_strided_examples_match_by_strides():
    x = torch.randn(8, 4).t()
    match = torch_matcher(x)
    assert match((torch.randn(8, 4).t(),)) is not None
    assert match((torch.randn(4, 8),)) is None


@pytest.mark.torch
def test_parameters_are_recognised_where_no_gradient_is_recorded():
    weight = torch.nn.Parameter(torch.randn(8))
    with torch.no_grad():
        match = torch_matcher(weight)
        assert match((weight,)) == [weight.data_ptr()]
    assert match((weight,)) is None


@pytest.mark.torch
def test_unaligned_and_empty_tensors_have_no_guard():
    assert adapter_of(torch.randn(9)).guard(torch.randn(9)[1:]) is None
    assert adapter_of(torch.randn(9)).guard(torch.randn(0, 4)) is None


@pytest.mark.torch
def test_the_joint_check_keeps_no_tensor_alive_and_agrees_with_the_guards():
    x, w = torch.randn(4, 8), torch.randn(8)
    likeness = adapter_of(x).likeness((x, w))
    assert likeness is not None  # this version of torch has it
    assert likeness.check(torch.randn(4, 8), w) and not likeness.check(x, w.double())
    assert not likeness.check(x, w._neg_view()) and not likeness.check(x.to_sparse(), w)
    gone = weakref.ref(x)
    del x
    assert gone() is None


@pytest.mark.torch
def test_the_same_tensor_twice_is_recognised_without_the_joint_check():
    x = torch.randn(8)
    assert torch_matcher(x, x)((x, x)) == [x.data_ptr()] * 2
    with torch.inference_mode():
        assert torch_matcher(x)((x,)) is not None
    match = torch_matcher(x)
    with torch.inference_mode():  # other dispatch keys
        assert match((x,)) == [x.data_ptr()]


def test_an_error_that_is_not_foreseen_is_not_hidden():
    match = matcher([Guard("{t}.address()", ("{t}.shape == {shape}",), {"shape": (2,)})])
    with pytest.raises(TypeError):
        match((type("T", (), {"address": 3, "shape": (2,)})(),))


@pytest.mark.torch
def test_recent_problems_are_found_again_and_give_the_same_bits(monkeypatch):
    """Alternating shapes, attributes, devices' choices and outputs: each call gets its own problem."""
    searched = []
    find_entry = call_module.find_entry
    monkeypatch.setattr(call_module, "find_entry", lambda *a: searched.append(a) or find_entry(*a))
    x = [torch.randn(3, 24), torch.randn(5, 24), torch.randn(3, 24, dtype=torch.float64).float()[:, :16]]
    with cki.device("sim"):
        first = [cki.rms_norm(t, eps=eps) for t in x for eps in (1e-6, 0.5)]
        second = [cki.rms_norm(t, eps=eps) for t in x for eps in (1e-6, 0.5)]  # now they get their functions
        assert all(torch.equal(a, b) for a, b in zip(first, second))
        del searched[:]
        again = [cki.rms_norm(t, eps=eps) for t in x for eps in (1e-6, 0.5)]
        assert not searched
        assert all(torch.equal(a, b) for a, b in zip(first, again))
        assert not torch.equal(first[0], first[1])
        out = torch.empty(3, 24)
        assert cki.rms_norm(x[0], out=out) is out
        assert cki.rms_norm(x[0], out=out) is out and torch.equal(out, first[0])


@pytest.mark.torch
def test_a_variant_of_an_operation_has_problems_of_its_own():
    """Benchmarks plan one operation in several ways under its name."""
    planned = []

    def plan(problem, outputs, device):
        planned.append(problem)
        return RMS_NORM.plan(problem, outputs, device)

    variant, x = dataclasses.replace(RMS_NORM, plan=plan), torch.randn(3, 40)
    with cki.device("sim"):
        for spec in (RMS_NORM, variant, RMS_NORM, variant):
            call_module.call(spec, (x, None, None), (1e-6, 0.0, "rounded"), (None, None))
    assert len(planned) == 1


@pytest.mark.torch
def test_a_recognised_call_still_refuses_overlap():
    memory = torch.randn(6, 24)
    with cki.device("sim"):
        out = torch.empty(3, 24)
        for _ in range(2):
            cki.linear(memory[:3], torch.eye(24), out=out)
        with pytest.raises(cki.CkiError, match="out shares memory with x"):
            cki.linear(memory[:3], torch.eye(24), out=memory[1:4])


@pytest.mark.torch
def test_a_held_plan_says_what_differs():
    with cki.device("sim"):
        held = cki.hold(cki.rms_norm, torch.randn(4, 8))
        with pytest.raises(ValueError, match=r"x is f32\[3, 8\] on cpu, planned for f32\[4, 8\] on cpu"):
            held(torch.randn(3, 8))
        with pytest.raises(ValueError, match=r"with strides \(1, 4\), planned for"):
            held(torch.randn(8, 4).t())
        with pytest.raises(InvalidArgumentError, match="stream is 0: a plan is held for any"):
            cki.hold(cki.rms_norm, torch.randn(4, 8), stream=0)
        x = np.ones((4, 8), np.float32)
        held, out = cki.hold(cki.rms_norm, x, out=x.copy()), x.copy()
        out.flags.writeable = False
        with pytest.raises(InvalidArgumentError, match=r"out is f32\[4, 8\] on cpu, read-only, planned for"):
            held(x, out=out)


def test_numpy_calls_go_by_key():
    x = np.ones((2, 8), np.float32)
    with cki.device("sim"):
        assert np.array_equal(cki.rms_norm(x), cki.rms_norm(x))
    assert adapter_of(x).guard(x) is None
