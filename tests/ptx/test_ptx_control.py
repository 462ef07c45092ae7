"""elect, named barriers, setmaxnreg, programmatic launch, fences: what can be seen of them from outside."""

from __future__ import annotations

import numpy as np

from tests.ptx.operands import load


def test_control(device) -> None:
    out = device.array(np.zeros(10, np.uint32))
    load("control.cu", "control")(1, 256, out)
    device.synchronize()
    out = device.numpy(out)
    assert list(out[:8]) == [1] * 8  # one lane of each warp was elected
    assert out[8] == 42  # bar_arrive published the producer's store
    assert out[9] == 20
