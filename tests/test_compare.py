"""The bound that every numerical test rests on must itself be able to fail."""

from __future__ import annotations

import numpy as np
import pytest

from tests.compare import assert_close, bound

TRUTH = np.array([1.0, -2.0, 4.0])


def test_twice_the_plain_error_passes_and_more_does_not():
    plain = TRUTH + 1e-3
    assert_close(TRUTH + 1.9e-3, TRUTH, plain)
    with pytest.raises(AssertionError, match="largest error"):
        assert_close(TRUTH + 2.1e-3, TRUTH, plain)


@pytest.mark.parametrize("special", [np.nan, np.inf])
def test_a_plain_computation_that_overflows_allows_nothing(special):
    plain = np.array([1.0, special, 4.0])
    assert bound(TRUTH, plain) == pytest.approx(4e-5)
    with pytest.raises(AssertionError, match="NaN or infinity"):
        assert_close(plain, TRUTH, plain)
    with pytest.raises(AssertionError, match="largest error"):
        assert_close(TRUTH + 1e-2, TRUTH, plain)


def test_specials_of_the_truth_must_be_met():
    truth = np.array([np.nan, -np.inf, 1.0])
    assert_close(truth.copy(), truth, truth)
    with pytest.raises(AssertionError, match="NaN or infinity"):
        assert_close(np.array([0.0, -np.inf, 1.0]), truth, truth)


def test_shapes_must_agree():
    with pytest.raises(AssertionError, match="shape"):
        bound(TRUTH, TRUTH[:2])
