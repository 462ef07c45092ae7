"""`cki.merge_states` against its definition, and under every check of the simulated device."""

from __future__ import annotations

import numpy as np
import pytest

import cki
from cki import reference
from tests.compare import assert_close
from tests.ops.inputs import DTYPES, normal
from tests.orders import every_check, orders


def states(count, rows, dim, dtype, seed=0, empty=0.3):
    """Outputs and lses; some states are empty and hold NaN."""
    generator = np.random.default_rng(seed)
    outs = generator.standard_normal((count, *rows, dim)).astype(dtype)
    lses = (generator.standard_normal((count, *rows)) * 4).astype(np.float32)
    hidden = generator.random(lses.shape) < empty
    lses[hidden] = -np.inf
    outs[hidden] = np.nan
    return outs, lses


def check(device, outs, lses):
    out, lse = cki.merge_states(device.array(outs), device.array(lses))
    truth, truth_lse = reference.merge_states(outs, lses)
    assert_close(device.numpy(out), truth, truth.astype(outs.dtype))
    assert_close(device.numpy(lse), truth_lse, truth_lse.astype(np.float32), "lse")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("count", "rows", "dim"),
    [(1, (3,), 8), (2, (5, 3), 64), (7, (2, 3, 5), 20), (3, (4, 2), 7), (40, (9,), 128)],
)
def test_any_number_of_states(device, dtype, count, rows, dim):
    check(device, *states(count, rows, dim, DTYPES[dtype]))


def test_all_states_empty_gives_zero_and_minus_infinity(device):
    outs, lses = states(3, (4,), 16, DTYPES["bf16"], empty=1.0)
    out, lse = (device.numpy(t) for t in cki.merge_states(device.array(outs), device.array(lses)))
    assert (out.astype(np.float32) == 0).all()
    assert (lse == -np.inf).all()


def test_lses_of_attention_are_merged_through_a_transposed_view(device):
    q, k, v = (normal((2, n, 2, 16), np.float32, i) for i, n in enumerate((3, 11, 11)))
    arrays = [device.array(t) for t in (q, k, v)]
    parts = [
        cki.attention(arrays[0], arrays[1][:, a:b], arrays[2][:, a:b], return_lse=True)
        for a, b in ((0, 4), (4, 4), (4, 11))
    ]
    outs = np.stack([device.numpy(out) for out, _ in parts])
    lses = device.array(np.stack([device.numpy(lse) for _, lse in parts])).transpose(0, 1, 3, 2)
    out, lse = cki.merge_states(device.array(outs), lses)
    whole, whole_lse = reference.attention(q, k, v, return_lse=True)
    np.testing.assert_allclose(device.numpy(out), whole, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(device.numpy(lse), whole_lse.transpose(0, 2, 1), rtol=2e-6, atol=2e-6)


def test_strided_states_and_given_outputs(device):
    outs, lses = states(4, (3, 2), 24, DTYPES["f16"])
    wide = np.zeros((4, 3, 2, 40), np.float16)
    wide[..., 9:33] = outs
    out, lse = device.empty((3, 2, 24), np.float16), device.empty((3, 2), np.float32)
    results = cki.merge_states(device.array(wide)[..., 9:33], device.array(lses), out=out, lse_out=lse)
    assert results[0] is out and results[1] is lse
    truth, truth_lse = reference.merge_states(outs, lses)
    assert_close(device.numpy(out), truth, truth.astype(np.float16))
    assert_close(device.numpy(lse), truth_lse, truth_lse.astype(np.float32), "lse")


def test_under_every_check(device):
    outs, lses = states(5, (20, 3), 24, DTYPES["bf16"])
    for seed in orders(device):
        with every_check(device, seed):
            check(device, outs, lses)


def test_every_broken_rule_is_named():
    with cki.device("sim"), pytest.raises(cki.errors.InvalidTypeError) as caught:
        cki.merge_states(np.zeros((2, 3, 0), np.int32), np.zeros((2, 4), np.float16))
    for words in ("outs is i32", "lses is f16", "(2, 3, 0)", "lses has shape (2, 4)", "lses of shape (2, 3)"):
        assert words in str(caught.value)


def test_no_rows_and_no_states():
    with cki.device("sim"):
        out, lse = cki.merge_states(np.zeros((2, 0, 8), np.float32), np.zeros((2, 0), np.float32))
        assert out.shape == (0, 8) and lse.shape == (0,)
        with pytest.raises(cki.errors.InvalidArgumentError, match="no state"):
            cki.merge_states(np.zeros((0, 3, 8), np.float32), np.zeros((0, 3), np.float32))
