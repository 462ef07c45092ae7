"""Calls with a problem that is known (`cki.ops.steady`): that the generated functions do what the first call did, and
that they serve no other problem."""

from __future__ import annotations

import dataclasses
import inspect

import numpy as np
import pytest

import cki
from cki.errors import CkiError, InvalidArgumentError, InvalidTypeError
from cki.ops import call as call_module
from cki.ops.table import public_specs
from tests.adapters.examples import EXAMPLES
from tests.toy import AFFINE, affine

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def on_the_simulated_device():
    with cki.device("sim"):
        yield


@pytest.fixture
def searched(monkeypatch):
    """Calls that went by the key, not by a generated function."""
    found = []
    find_entry = call_module.find_entry
    monkeypatch.setattr(call_module, "find_entry", lambda *args: found.append(args) or find_entry(*args))
    return found


def tensors(value):
    """Arrays of an example as torch tensors."""
    if isinstance(value, tuple):
        return tuple(map(tensors, value))
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.name.startswith("float8"):
        return torch.from_numpy(value.view(np.uint8)).view(getattr(torch, value.dtype.name))
    return torch.from_numpy(value.copy())


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_attributes_that_are_equal_but_of_a_wrong_type(name):
    """True == 1 == 1.0 in Python: what was remembered under one must not serve another, of any operation.

    The first refusal is of a look-up by key, the second of the generated function.
    """
    arrays, options = EXAMPLES[name]
    function, given = getattr(cki, name), {key: tensors(value) for key, value in arrays.items()}
    parameters = inspect.signature(function).parameters
    tried = 0
    for attribute in public_specs()[name].attributes:
        value = options.get(attribute.name, attribute.default)
        if attribute.name not in parameters:
            continue
        if attribute.type is bool:
            wrong = [int(value), float(value)]
        elif attribute.type in (int, float) and value in (0, 1):
            wrong = [bool(value)]
        elif attribute.type is tuple and value and all(item in (0, 1) for item in value):
            wrong = [tuple(map(float, value))]
        else:
            continue
        for _ in range(2):
            function(**given, **{**options, attribute.name: value})
            for other in wrong:
                with pytest.raises(CkiError, match=attribute.name):
                    function(**given, **{**options, attribute.name: other})
        tried += 1
    boolean = [a for a in public_specs()[name].attributes if a.type is bool and a.name in parameters]
    assert tried >= len(boolean)


def test_a_list_that_changes_is_another_attribute(searched):
    q = torch.randn(1, 9, 2, 16)
    window = [2, 0]
    narrow = cki.attention(q, q, q, window=window)
    assert torch.equal(cki.attention(q, q, q, window=(2, 0)), narrow)
    window[0] = 5
    assert torch.equal(cki.attention(q, q, q, window=window), cki.attention(q, q, q, window=(5, 0)))
    assert not torch.equal(cki.attention(q, q, q, window=window), narrow)
    with pytest.raises(CkiError, match="window"):
        cki.attention(q, q, q, window=[False, 0])


def test_workspace_and_outputs_of_a_known_problem(searched):
    for number in range(4):
        x = torch.randint(-9, 9, (3, 40)).float()
        assert torch.equal(affine(x, factor=2.0, offset=1.0), 4 * x + 3)
        weight, residual = torch.randn(40), torch.randn(3, 40)
        y, total = cki.rms_norm(x, weight, residual=residual)
        assert torch.equal(total, x + residual)
        assert torch.equal(y, cki.rms_norm(total, weight))
        out, total_out = torch.empty(3, 40), torch.empty(3, 40)
        first, second = cki.rms_norm(x, weight, residual=residual, out=out, residual_out=total_out)
        assert first is out and second is total_out
        assert torch.equal(out, y) and torch.equal(total_out, total)
        mixed, given = cki.rms_norm(x, weight, residual=residual, residual_out=total_out)
        assert given is total_out and torch.equal(mixed, y)
        if number == 1:
            del searched[:]
    assert not searched


def test_another_number_of_outs_is_another_problem():
    x = torch.randn(3, 40)
    out = torch.empty(3, 40)
    call = call_module.call
    for _ in range(2):
        assert call(AFFINE, (x, None), (2.0, 0.0, 1), (out,)) is out
        assert torch.equal(call(AFFINE, (x, None), (2.0, 0.0, 1), ()), 2 * x)
        assert torch.equal(call(AFFINE, (x, None), (2.0, 0.0, 1), (None,)), 2 * x)


def test_overlap_is_refused_and_in_place_is_not():
    memory = torch.randn(6, 24)
    apart, over, same = memory[3:], memory[1:4], memory[:3]
    for _ in range(3):
        x = memory[:3].clone()
        assert torch.equal(affine(same, factor=2.0, steps=1, out=apart), 2 * x)
        with pytest.raises(InvalidArgumentError, match="out shares memory with x"):
            affine(same, factor=2.0, steps=1, out=over)
        assert torch.equal(affine(same, factor=2.0, steps=1, out=same), 2 * x)


def test_held_plans_of_every_kind():
    x, weight, residual = torch.randn(3, 40), torch.randn(40), torch.randn(3, 40)
    y, total = cki.rms_norm(x, weight, residual=residual)
    out, total_out = torch.empty(3, 40), torch.empty(3, 40)
    free = cki.hold(cki.rms_norm, x, weight, residual=residual)
    both = cki.hold(cki.rms_norm, x, weight, residual=residual, out=out, residual_out=total_out)
    last = cki.hold(cki.rms_norm, x, weight, residual=residual, residual_out=total_out)
    space = cki.hold(affine, x, factor=2.0)
    for stream in (None, 0, None):
        results = free(x, weight, residual, stream=stream)
        assert torch.equal(results[0], y) and torch.equal(results[1], total)
        out.zero_()
        results = both(x, weight, residual, out=(out, total_out), stream=stream)
        assert results[0] is out and results[1] is total_out
        assert torch.equal(out, y) and torch.equal(total_out, total)
        results = last(x, weight, residual, out=total_out, stream=stream)
        assert torch.equal(results[0], y) and results[1] is total_out
        assert torch.equal(space(x, stream=stream), 4 * x)


@pytest.mark.parametrize("given", [
    lambda x, w: (x,), lambda x, w: (x, w, w), lambda x, w: (x, None), lambda x, w: (w, x), lambda x, w: (x[:2], w),
    lambda x, w: (x.numpy(), w), lambda x, w: (x.double(), w), lambda x, w: (),
    lambda x, w: (torch.randn(121)[1:].view(3, 40), w),
])  # fmt: skip
def test_a_held_plan_says_once_what_it_is_not_for(given):
    x, weight, out = torch.randn(3, 40), torch.randn(40), torch.full((3, 40), 7.0)
    held = cki.hold(cki.rms_norm, x, weight, out=out)
    free = cki.hold(cki.rms_norm, x, weight)
    for call in (lambda: held(*given(x, weight), out=out), lambda: free(*given(x, weight))):
        with pytest.raises(InvalidArgumentError, match="rms_norm: ") as caught:
            call()
        assert caught.value.__context__ is None  # not raised while another error was handled
    for wrong in ((out, out), None, x[:2], [out]):
        with pytest.raises(InvalidArgumentError):
            held(x, weight, out=wrong)
    with pytest.raises(InvalidArgumentError, match="2 inputs and 0 outputs was given 2 and 1"):
        free(x, weight, out=out)
    assert bool((out == 7.0).all())
    assert held(x, weight, out=(out,)) is out


def test_a_tensor_whose_memory_is_gone_goes_the_long_way():
    x, weight = torch.randn(4, 64), torch.randn(64)
    for _ in range(2):
        cki.rms_norm(x, weight)
    x.untyped_storage().resize_(0)
    with pytest.raises(CkiError):
        cki.rms_norm(x, weight)


def test_known_problems_of_a_copied_spec_are_its_own():
    spec = dataclasses.replace(AFFINE)
    assert spec.recent is not AFFINE.recent
    assert spec == AFFINE


def test_problems_in_turn_are_expected_in_their_order():
    """Once each is known and all came round, no problem is tried that is another's."""
    spec, tried = dataclasses.replace(AFFINE), []
    shapes = [(2, 8), (5, 8), (3, 8), (7, 8)]

    def count(known):
        run = known.call
        known.call = lambda *args: tried.append(known) or run(*args)

    def once():
        for shape in shapes:
            x = torch.randint(-9, 9, shape).float()
            assert torch.equal(call_module.call(spec, (x, None), (2.0, 0.0, 1), (None,)), 2 * x)

    for _ in range(3):
        once()
    for known in spec.recent._known:
        count(known)
    assert len(spec.recent._known) == 4
    once()
    assert len(tried) == 4


def test_more_problems_than_are_kept():
    spec = dataclasses.replace(AFFINE)
    for _ in range(3):
        for rows in range(1, 13):
            x = torch.full((rows, 8), float(rows))
            assert torch.equal(call_module.call(spec, (x, None), (2.0, 0.0, 1), (None,)), 2 * x)
    assert len(spec.recent._known) == 8


def test_a_problem_that_never_comes_again_gets_no_function(searched):
    x = torch.randint(-9, 9, (11, 13)).float()
    spec = dataclasses.replace(AFFINE)
    for number in range(4):
        assert torch.equal(call_module.call(spec, (x, None), (2.0, 0.0, 1), (None,)), 2 * x)
        assert len(spec.recent._known) == (number > 0)
    assert len(searched) == 2


def test_tensors_with_a_tangent_are_refused():
    """Forward-mode differentiation: the result would carry none, and nothing would say so."""
    from torch.autograd import forward_ad

    import cki.adapters.torch_ops

    x, out = torch.randn(3, 56), torch.zeros(3, 56)
    for _ in range(3):
        expected = cki.rms_norm(x)
    with forward_ad.dual_level():
        for _ in range(3):
            assert torch.equal(cki.rms_norm(x), expected)
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            for given in ((dual, None), (x, dual)):
                with pytest.raises(InvalidTypeError, match="tangent of forward-mode differentiation"):
                    cki.rms_norm(given[0], residual=given[1])
            with pytest.raises(InvalidTypeError, match="out carries a tangent"):
                cki.rms_norm(x, out=forward_ad.make_dual(out, out))
            assert torch.equal(cki.rms_norm(forward_ad.unpack_dual(dual).primal), expected)
        with pytest.raises(InvalidTypeError, match="x carries a tangent"):
            torch.ops.cki.rms_norm(dual)
    assert not out.any()


def test_written_tensors_count_their_writes():
    """As after torch's own out=, a backward pass that needs what was there says so."""
    x = torch.randn(3, 56)
    held = cki.hold(cki.rms_norm, x, out=torch.empty_like(x))
    odd = torch.randn(169)[1:].view(3, 56)  # found by its key
    held_odd = cki.hold(cki.rms_norm, odd, out=torch.empty_like(x))
    calls = [lambda out: cki.rms_norm(x, out=out)] * 3 + [lambda out: held(x, out=out)] * 2
    calls += [lambda out: cki.rms_norm(odd, out=out), lambda out: held_odd(odd, out=out)]
    calls += [lambda out: held(x, out=out, stream=0), lambda out: cki.rms_norm(x, out=out, stream=0)]
    for call in calls:
        leaf = torch.randn(3, 56, requires_grad=True)
        inner = leaf * 1
        loss = (inner * inner).sum()
        before = inner._version, x._version
        with torch.no_grad():
            call(inner)
        assert (inner._version, x._version) == (before[0] + 1, before[1])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        with torch.inference_mode():
            call(torch.empty(3, 56))


def test_caches_count_their_writes():
    k, slots = torch.randn(2, 1, 8), torch.tensor([3, 5])
    caches = torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8)
    for number in range(1, 4):
        cki.append_kv(k, k, caches, slots)
        assert [cache._version for cache in caches] == [number, number]
    assert k._version == 0
