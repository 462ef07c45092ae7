"""A decoder's products of few tokens: norm, product, gates, residual in one launch."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest

import cki
import cki.sim
from cki import dtypes
from cki.device import sim_device
from cki.engine.program import StepProgram
from cki.engine.quantized import quantize_blocks
from cki.errors import UnsupportedError
from cki.heuristics.linear_decode import NO_CLUSTERS
from cki.operand import dense
from cki.ops.linear_decode import Norm, plan_linear_decode
from cki.plan import Plan
from tests.compare import assert_close
from tests.ops.inputs import BF16, F16, F32
from tests.ops.token_cases import EPSILON, definition, placed


@dataclasses.dataclass(frozen=True)
class Case:
    """tokens x depth by columns; bias: its type."""

    tokens: int
    depth: int
    columns: int
    dtype: np.dtype = BF16
    norm: bool = False
    gated: bool = False
    activation: str | None = None
    bias: np.dtype | None = None
    residual: bool = False
    sm_count: int = 2
    codes: bool = False
    split: int = 1


def inputs(case: Case) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(case.depth + case.tokens)
    rows = case.columns * (2 if case.gated else 1)
    found = {
        "x": rng.normal(size=(case.tokens, case.depth)) * (3 if case.norm else 1),
        "w": rng.normal(size=(rows, case.depth)) / np.sqrt(case.depth),
        "y": rng.normal(size=(case.tokens, case.columns)),
    }
    if case.norm:
        found["gamma"] = 1 + 0.2 * rng.normal(size=case.depth)
    found = {name: values.astype(case.dtype) for name, values in found.items()}
    if case.codes:
        quantized = quantize_blocks(found["w"].astype(F32))
        found |= {"w": quantized.codes, "scales": quantized.scales}
    if case.bias is not None:
        found["bias"] = rng.normal(size=rows).astype(case.bias)
    return found


def run(case: Case, arrays, device) -> np.ndarray:
    if case.split > 1 and device.arch in NO_CLUSTERS:
        pytest.skip("clusters need sm_90")
    memory, operands = placed(arrays, device)
    steps = plan_linear_decode(
        operands["x"], operands["w"], operands.get("bias"), operands["y"] if case.residual else None, operands["y"],
        dataclasses.replace(device, sm_count=case.sm_count), activation=case.activation, gated=case.gated,
        norm=Norm(operands["gamma"], EPSILON) if case.norm else None, scales=operands.get("scales"),
        split=case.split,
    )  # fmt: skip
    assert len(steps) == 1
    StepProgram(Plan(steps), device, dict(memory.items())).launch(0)
    return np.asarray(memory["y"].numpy()).copy()


CASES = [
    Case(1, 576, 40, norm=True),
    Case(1, 2080, 33, norm=True),
    Case(16, 520, 36, norm=True, gated=True, activation="silu", bias=F32),
    Case(8, 4160, 17, F16, residual=True, bias=F16, sm_count=1),
    Case(1, 8, 5, F16, residual=True, bias=F16),
    Case(12, 272, 140, norm=True, gated=True, activation="silu", bias=BF16, codes=True, sm_count=5),
    Case(5, 1040, 33, F16, residual=True, codes=True),
    Case(1, 33808, 9, codes=True, sm_count=1),  # more than 32 rounds of scales
    Case(3, 1200, 130, residual=True, codes=True, sm_count=6, split=2),
    Case(9, 600, 75, F16, activation="relu", bias=F32, sm_count=4, split=4),
    Case(8, 192, 21, F16, norm=True, gated=True, activation="silu", codes=True, sm_count=1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_the_definition(device, case):
    arrays = inputs(case)
    checks = (
        cki.sim.checks(adversarial=True, hazards=True, races=True, seed=3)
        if device.kind == "sim"
        else contextlib.nullcontext()
    )
    with checks:
        got = run(case, arrays, device.info)
    truth, plain = (definition(case, arrays, case.dtype, rounded=rounded) for rounded in (False, True))
    assert_close(got, truth, plain, str(case))


@pytest.mark.parametrize("codes", [False, True])
def test_a_row_has_the_same_bits_in_any_company(device, codes):
    case = Case(16, 1040, 40, norm=True, gated=True, activation="silu", bias=F32, sm_count=4, codes=codes)
    arrays = inputs(case)
    together = run(case, arrays, device.info)
    for first, count in ((0, 1), (5, 3), (15, 1)):
        part = {**arrays, "x": arrays["x"][first : first + count], "y": arrays["y"][first : first + count]}
        alone = run(dataclasses.replace(case, tokens=count, sm_count=1), part, device.info)
        assert alone.tobytes() == together[first : first + count].tobytes()


@pytest.mark.parametrize("largest", [2.0**-120, 1e-20, 3e4, 1e30])
def test_bf16_beyond_the_range_of_f16_beside_codes(device, largest):
    case = Case(3, 384, 24, codes=True)
    arrays = inputs(case)
    x = arrays["x"].astype(np.float64)
    x[:, 128:256] *= 2.0**-20  # of less weight, in a block of its own
    x[:, ::3] *= 2.0**-12  # and beside larger ones
    arrays["x"] = (x / np.abs(x).max() * largest).astype(BF16)
    truth, plain = (definition(case, arrays, case.dtype, rounded=rounded) for rounded in (False, True))
    assert_close(run(case, arrays, device.info), truth, plain, str(largest))


@pytest.mark.parametrize(
    ("x", "w", "y", "match"),
    [
        (((17, 64), dtypes.bf16), ((16, 64), dtypes.bf16), (17, 16), "17 tokens, not 1 to 16"),
        (((16, 12288), dtypes.bf16), ((16, 12288), dtypes.bf16), (16, 16), "16 rows of 12288 do not fit"),
        (((1, 12), dtypes.bf16), ((16, 12), dtypes.bf16), (1, 16), "K is 12, no multiple of 8"),
        (((1, 64), dtypes.f32), ((16, 64), dtypes.f32), (1, 16), "not both f16 or bf16, or w e4m3"),
        (((1, 64), dtypes.bf16), ((17, 64), dtypes.bf16), (1, 16), "17 rows for 16 columns"),
    ],
)
def test_what_it_cannot_compute_is_refused(x, w, y, match):
    with pytest.raises(UnsupportedError, match=match):
        plan_linear_decode(
            dense("x", *x), dense("w", *w), None, None, dense("y", y, x[1]), sim_device("sm_90a")
        )
