"""Products of few tokens by wgmma, cut evenly over the blocks: norm, product, gates, residual in one launch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import cki
import cki.sim
from cki import dtypes
from cki.device import sim_device
from cki.engine.program import StepProgram, Workspace
from cki.engine.quantized import quantize_blocks
from cki.errors import UnsupportedError
from cki.operand import dense
from cki.ops.linear_decode import Norm
from cki.ops.linear_tokens import plan_linear_tokens
from tests.compare import assert_close
from tests.ops.inputs import BF16, F32
from tests.ops.token_cases import EPSILON, definition, placed


@dataclasses.dataclass(frozen=True)
class Case:
    """tokens x depth by columns; bias: its type.  sm_count: blocks that share the stages of all tiles."""

    tokens: int
    depth: int
    columns: int
    norm: bool = False
    gated: bool = False
    activation: str | None = None
    bias: np.dtype | None = None
    residual: bool = False
    sm_count: int = 2
    codes: bool = True  # as `definition` asks


def inputs(case: Case) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(case.depth + case.tokens)
    rows = case.columns * (2 if case.gated else 1)
    found = {
        "x": (rng.normal(size=(case.tokens, case.depth)) * (3 if case.norm else 1)).astype(BF16),
        "y": rng.normal(size=(case.tokens, case.columns)).astype(BF16),
    }
    if case.norm:
        found["gamma"] = (1 + 0.2 * rng.normal(size=case.depth)).astype(BF16)
    w = rng.normal(size=(rows, case.depth)) / np.sqrt(case.depth)
    # Blocks of very different sizes: a scale that is another block's shows.
    w *= 2.0 ** rng.integers(-3, 3, (rows, -(-case.depth // 128))).repeat(128, 1)[:, : case.depth]
    quantized = quantize_blocks(w.astype(F32))
    found |= {"w": quantized.codes, "scales": quantized.scales}
    if case.bias is not None:
        found["bias"] = rng.normal(size=rows).astype(case.bias)
    return found


def run(case: Case, arrays, device, launches: int = 1) -> np.ndarray:
    arrays = {**arrays, "counters": np.zeros(256, np.uint32)}
    memory, operands = placed(arrays, device)
    plan = plan_linear_tokens(
        operands["x"], operands["w"], operands.get("bias"), operands["y"] if case.residual else None, operands["y"],
        dataclasses.replace(device, sm_count=case.sm_count), activation=case.activation, gated=case.gated,
        norm=Norm(operands["gamma"], EPSILON) if case.norm else None, scales=operands.get("scales"),
        counters=operands["counters"],
    )  # fmt: skip
    assert len(plan.steps) == 1
    program = StepProgram(plan, device, {**dict(memory.items()), **Workspace(device).take(plan)})
    for _ in range(launches):
        program.launch(0)
    assert not np.asarray(memory["counters"].numpy()).any()
    return np.asarray(memory["y"].numpy()).copy()


CASES = [
    Case(1, 16, 5),
    Case(
        5, 656, 260, norm=True, bias=BF16, sm_count=3
    ),  # tiles that two blocks share, and one tile more than whole
    Case(16, 528, 128, norm=True, gated=True, activation="silu", bias=F32, sm_count=3),
    Case(13, 400, 136, residual=True, activation="gelu", sm_count=5),
    Case(9, 272, 100, norm=True, residual=True, sm_count=1),
    Case(8, 1152, 64, residual=True, sm_count=7),  # one tile of many parts
    Case(11, 400, 260, norm=True, sm_count=7),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_the_definition(device, case):
    arrays = inputs(case)
    if device.kind == "sim":
        with cki.sim.checks(adversarial=True, hazards=True, races=True, seed=3):
            found = run(case, arrays, device.info)
    else:
        found = run(case, arrays, device.info)
    exact, plain = (definition(case, arrays, BF16, rounded=rounded) for rounded in (False, True))
    assert_close(found.astype(np.float64), exact, plain)


def test_a_row_has_the_same_bits_in_any_company(device):
    """Of the same size of products and the same cut of K."""
    case = Case(16, 656, 128, norm=True, gated=True, activation="silu", sm_count=3)
    arrays = inputs(case)
    together = run(case, arrays, device.info)
    part = {**arrays, "x": arrays["x"][5:14], "y": arrays["y"][5:14]}
    alone = run(dataclasses.replace(case, tokens=9), part, device.info, launches=2)
    assert alone.tobytes() == together[5:14].tobytes()


@pytest.mark.parametrize(
    ("x", "w", "y", "options", "match"),
    [
        (((17, 64), dtypes.bf16), ((16, 64), dtypes.e4m3), (17, 16), {}, "17 tokens, not 1 to 16"),
        (((2, 24), dtypes.bf16), ((16, 24), dtypes.e4m3), (2, 16), {}, "K is 24, no multiple of 16"),
        (((2, 64), dtypes.bf16), ((16, 64), dtypes.bf16), (2, 16), {}, "not bf16, bf16 and e4m3"),
        (((2, 64), dtypes.bf16), ((16, 64), dtypes.e4m3), (2, 16), {}, "scales is None"),
        (((2, 64), dtypes.bf16), ((64, 64), dtypes.e4m3), (2, 32), {"gated": True}, "no multiple of 64"),
    ],
)
def test_what_it_cannot_compute_is_refused(x, w, y, options, match):
    operands = dense("x", *x), dense("w", *w), None, None, dense("y", y, x[1])
    with pytest.raises(UnsupportedError, match=match):
        plan_linear_tokens(*operands, sim_device("sm_90a"), counters=dense("c", (64,), dtypes.u32), **options)
    with pytest.raises(UnsupportedError, match="it needs sm_90a"):
        plan_linear_tokens(*operands, sim_device("sm_80"), counters=dense("c", (64,), dtypes.u32), **options)
