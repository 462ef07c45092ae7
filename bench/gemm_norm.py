"""A layer norm inside a product, against the norm's own launch and a product: BERT-large's two, all in turn.

    python bench/gemm_norm.py                                # 512, 2048 and 8192 rows, half a minute on an H200
    python bench/gemm_norm.py --shape 8192x1024x4096:gelu

"folded" is `cki.linear` of rows as they are, with the norm in the weight (`cki.prepare`) and each row's factor from its
statistics (docs/linear_hopper.md); "spare warps" has those read by warps that are idle else.  Against it: a norm,
then the product, by CKI, or the product by cuBLASLt (torch `addmm`, and a launch of its own for GELU), or all by torch;
"no norm" is our product alone.  "residual" and "residual, statistics" are the product before it, 1024 by 1024 with a
residual: what statistics cost where they are made; "by TMA" has the residual brought so.  Before timing, results are
compared with float64 on the GPU.

`vs_torch`: time of our norm and cuBLASLt's product over this one's.  Writes results/gemm_norm.csv.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import common
import gemm
from gemm import LinearProblem

import cki
from cki import cache, dtypes
from cki.device import sim_device
from cki.encoder.prepare import fold_layer_norm
from cki.heuristics.linear_hopper import STATISTICS_COLUMNS, HopperTile
from cki.operand import Operand, dense
from cki.ops.call import call
from cki.ops.linear import LINEAR, plan_linear
from cki.ops.linear_hopper import RowNorm
from cki.ops.linear_norm import fused_norm_tile
from cki.ops.spec import Input, OpSpec, OutputSpec, Problem
from cki.plan import Plan, Step

SHAPES = tuple(f"{rows}x{shape}" for rows in (512, 2048, 8192) for shape in ("1024x3072", "1024x4096:gelu"))
EPSILON = 1e-5
ROUNDS = 20
YARDSTICK = "layer_norm, torch"
Change = Callable[[HopperTile], HopperTile]
_LIMIT = {"bf16": 2.0**-7, "f16": 2.0**-10}


def _infer(problem: Problem) -> Mapping[str, OutputSpec]:
    found = dict(LINEAR.infer(problem))
    if problem.get("statistics") is None:  # then it stores those of its own rows
        (rows, columns), _ = found["out"]
        found["statistics_out"] = OutputSpec((rows, columns // STATISTICS_COLUMNS, 2), dtypes.f32)
    return found


def with_spare_warps(tile: HopperTile) -> HopperTile:
    """Whose statistics of x are read by warps that are idle else; of 128 x 128 where the choice has no room."""
    if tile.parks:
        tile = HopperTile(128, 128, 6, True, pairs=tile.pairs)
    return dataclasses.replace(tile, spare_warps=True)


def loading(tile: HopperTile) -> HopperTile:
    """Whose consumers load the residual, which TMA would bring."""
    return dataclasses.replace(tile, fetches=False)


def as_chosen(tile: HopperTile) -> HopperTile:
    """The model's choice itself."""
    return tile


def without_spare_warps(tile: HopperTile) -> HopperTile:
    """Whose consumers read the statistics of x."""
    return dataclasses.replace(tile, spare_warps=False)


def norm_linear(change: Change) -> OpSpec:
    """A linear layer that normalises its rows by given statistics, or else stores those of its result.

    change: what is made of the tile that the model chooses.
    """

    def plan(problem: Problem, outputs: Mapping[str, Operand], device: Any) -> Plan:
        x, w, statistics = problem["x"], problem["w"], problem.get("statistics")
        return Plan(plan_norm_linear(
            x, w, problem["bias"], problem.get("residual"), outputs["out"], device, problem.attribute("activation"),
            statistics, outputs.get("statistics_out"), change,
        ))  # fmt: skip

    return OpSpec(
        "norm_linear", (*LINEAR.inputs, Input("statistics", True)), LINEAR.attributes, ("out", "statistics_out"),
        lambda problem: None, _infer, plan,
    )  # fmt: skip


def plan_norm_linear(
    x: Operand, w: Operand, bias: Operand, residual: Operand | None, y: Operand, device: Any, activation: str | None,
    statistics: Operand | None, y_statistics: Operand | None, change: Change,
) -> tuple[Step, ...]:  # fmt: skip
    """The launch.  statistics: of x's rows.  y_statistics: where those of y's go."""
    norm = None if statistics is None else RowNorm("layer", statistics, EPSILON)
    tile = fused_norm_tile(
        x,
        w,
        residual,
        y,
        device,
        activation=activation,
        norm=norm and norm.kind,
        statistics=y_statistics is not None,
    )
    if tile is None:
        raise SystemExit(f"{x.shape} by {w.shape}: no tile of Hopper's kernel is the choice")
    return plan_linear(
        x, w, bias, residual, y, device, activation=activation, norm=norm, statistics=y_statistics,
        tile=change(tile),
    )  # fmt: skip


class Inputs(NamedTuple):
    """Of one call.  folded_w, shift: w and bias with the norm in them.  before: w, bias of the product before."""

    x: Any
    w: Any
    bias: Any
    gamma: Any
    beta: Any
    folded_w: Any
    shift: Any
    statistics: Any
    before: tuple[Any, Any]
    y: Any
    normal: Any
    r: Any
    r_statistics: Any


def make_inputs(problem: LinearProblem, seed: int, device: str = "cuda") -> Inputs:
    """Torch tensors; results hold NaN."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, gemm.TORCH[problem.dtype])

    def normal(*size: int, scale: float = 1.0) -> Any:
        return (torch.randn(*size, generator=generator, device=device) * scale).to(dtype)

    def empty(*size: int, of: Any = dtype) -> Any:
        return torch.full(size, float("nan"), device=device, dtype=of)

    rows, depth, columns = problem.rows, problem.depth, problem.columns
    x, w, bias = normal(rows, depth), normal(depth, columns, scale=depth**-0.5), normal(columns)
    gamma, beta = 1 + normal(depth, scale=0.1), normal(depth, scale=0.1)
    folded_w, shift = fold_layer_norm("torch", w, gamma, beta, bias)
    slots = depth // STATISTICS_COLUMNS
    return Inputs(
        x, w, bias, gamma, beta, folded_w, shift, statistics_of(x),
        (normal(depth, depth, scale=depth**-0.5), normal(depth)),
        empty(rows, columns), empty(rows, depth), empty(rows, depth), empty(rows, slots, 2, of=torch.float32),
    )  # fmt: skip


def statistics_of(x: Any) -> Any:
    """[rows, width / 64, 2]: sum and sum of squares, as the kernel stores them."""
    import torch

    parts = x.float().reshape(len(x), -1, STATISTICS_COLUMNS)
    return torch.stack([parts.sum(-1), parts.square().sum(-1)], -1).contiguous()


def implementations(problem: LinearProblem) -> dict[str, Callable[[Inputs], Any]]:
    """By name; each returns what it has written."""
    import torch

    layout = "in_out"

    def torch_product(rows: Any, i: Inputs) -> Any:
        torch.addmm(i.bias, rows, i.w, out=i.y)
        return torch.nn.functional.gelu(i.y) if problem.activation else i.y

    def product(rows: Any, i: Inputs) -> Any:
        return cki.linear(rows, i.w, i.bias, activation=problem.activation, out=i.y)

    def norm(i: Inputs) -> Any:
        return cki.layer_norm(i.x, i.gamma, i.beta, eps=EPSILON, out=i.normal)

    def torch_norm(i: Inputs) -> Any:
        return torch.nn.functional.layer_norm(i.x, (problem.depth,), i.gamma, i.beta, EPSILON)

    def folded(change: Change) -> Callable[[Inputs], Any]:
        spec = norm_linear(change)
        return lambda i: call(
            spec, (i.x, i.folded_w, i.shift, None, i.statistics), (problem.activation, layout), (i.y, None)
        )  # fmt: skip

    def stored(change: Change) -> Callable[[Inputs], Any]:
        spec = norm_linear(change)
        return lambda i: call(spec, (i.x, *i.before, i.x, None), (None, layout), (i.r, i.r_statistics))[0]

    return {
        "folded": folded(without_spare_warps),
        "folded, spare warps": folded(with_spare_warps),
        YARDSTICK: lambda i: torch_product(norm(i), i),
        "layer_norm, cki": lambda i: product(norm(i), i),
        "torch layer_norm, torch": lambda i: torch_product(torch_norm(i), i),
        "no norm": lambda i: product(i.x, i),
        "residual": lambda i: cki.linear(i.x, *i.before, residual=i.x, out=i.r),
        "residual, statistics": stored(loading),
        "residual, statistics, by TMA": stored(as_chosen),
    }


def expected(problem: LinearProblem, name: str, i: Inputs) -> Any:
    """What an implementation should return, in float64."""
    import torch

    x = i.x.double()
    if name.startswith("residual"):
        return x @ i.before[0].double() + i.before[1].double() + x
    if name != "no norm":
        x = torch.nn.functional.layer_norm(x, (problem.depth,), i.gamma.double(), i.beta.double(), EPSILON)
    y = x @ i.w.double() + i.bias.double()
    return torch.nn.functional.gelu(y) if problem.activation else y


def check(problem: LinearProblem, name: str, run: Callable[[Inputs], Any], i: Inputs) -> float:
    """The largest error relative to the largest value; ends when it is too large."""
    truth = expected(problem, name, i)
    error = float((run(i).double() - truth).abs().max() / truth.abs().max())
    if not error <= _LIMIT[problem.dtype]:
        raise SystemExit(f"{name}: relative error {error:.2e}, at most {_LIMIT[problem.dtype]:.2e} is right")
    if name.startswith("residual, statistics"):
        found, wanted = i.r_statistics, statistics_of(i.r)
        if not float((found - wanted).abs().max()) <= 1e-4 * float(wanted.abs().max()):
            raise SystemExit("the statistics of the result are not its own")
    return error


def compile_ahead(problems: list[LinearProblem]) -> None:
    """Fills the cache with the products, several at a time."""
    device = sim_device("sm_90a")
    specs: dict[Any, None] = {}
    for rows, depth, columns, _, name, _ in problems:
        dtype = getattr(dtypes, name)
        x, w, bias = (
            dense("x", (rows, depth), dtype),
            dense("w", (depth, columns), dtype),
            dense("b", (columns,), dtype),
        )
        y, r, before = (
            dense("y", (rows, columns), dtype),
            dense("r", (rows, depth), dtype),
            dense("v", (depth, depth), dtype),
        )
        shift, vector = dense("c", (columns,), dtypes.f32), dense("d", (depth,), dtype)
        statistics = dense("s", (rows, depth // STATISTICS_COLUMNS, 2), dtypes.f32)
        activation = "gelu" if columns == 4 * depth else None
        for steps in (
            plan_linear(x, w, bias, None, y, device, activation=activation),
            plan_linear(x, before, vector, x, r, device),
            *(
                plan_norm_linear(x, before, vector, x, r, device, None, None, statistics, change)
                for change in (loading, as_chosen)
            ),
            *(
                plan_norm_linear(x, w, shift, None, y, device, activation, statistics, None, change)
                for change in (without_spare_warps, with_spare_warps)
            ),
        ):
            specs.update({step.kernel: None for step in steps})
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda spec: cache.get(spec, device.arch), specs))


def measure(problem: LinearProblem) -> list[dict[str, object]]:
    """Rows of one shape, all in turn."""
    variants = implementations(problem)
    inputs = common.rotated(lambda seed: (make_inputs(problem, seed),), problem.nbytes, limit=8)
    errors = {name: check(problem, name, run, *inputs[0]) for name, run in variants.items()}
    times = common.graph_times_in_turn(variants, inputs, rounds=ROUNDS)
    shape = f"{problem.rows}x{problem.depth}x{problem.columns}"
    return [
        common.row(
            "norm_linear", shape + (problem.epilogue and f":{problem.epilogue}"), problem.dtype, name, timing,
            error=f"{errors[name]:.1e}",
            vs_torch="" if name.startswith("residual") else round(times[YARDSTICK].median_us / timing.median_us, 3),
        )
        for name, timing in times.items()
    ]  # fmt: skip


def main() -> None:
    """Measures and writes gemm_norm.csv."""
    parser = argparse.ArgumentParser(description="time of a layer norm inside a product")
    parser.add_argument(
        "--shape", type=gemm._shape, action="append", help="ROWSxDEPTHxCOLUMNS[:gelu]; may be repeated"
    )
    parser.add_argument("--dtype", choices=sorted(_LIMIT), default="f16")
    arguments = parser.parse_args()
    common.require_gpu()
    problems = [
        LinearProblem(rows, depth, columns, epilogue, arguments.dtype, "in_out")
        for rows, depth, columns, epilogue in arguments.shape or map(gemm._shape, SHAPES)
    ]
    compile_ahead(problems)
    common.write_csv("gemm_norm", [row for problem in problems for row in measure(problem)])


if __name__ == "__main__":
    main()
