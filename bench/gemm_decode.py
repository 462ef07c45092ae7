"""A decoder's products of 1 to 16 tokens (`cuda_src/gemm/skinny/decode.cu`), each launch by itself.

    python bench/gemm_decode.py                                # Qwen3-8B's four products, 1 to 16 tokens, bf16 and e4m3
    python bench/gemm_decode.py --product down --tokens 1 4 --weights bf16 --probe

The products of a layer: Q, K and V with the norm before; the attention's output with the residual; gate and up with the
norm and SwiGLU; down with the residual.  Weights are bf16, or e4m3 with scales of blocks of 128 x 128 beside bf16
activations.  Each is first compared with float64; one that is wrong ends the program.

`of_copy` is the weight's bytes a second over the rate of a copy in the same run (bytes read and written).  `launches`:
as many as the engine makes of it.  --probe: also without programmatic launch, with other rings and hints.
Method: CUDA graph replays over weights that together exceed the L2 cache three times, in turn (bench/common.py).
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import common

from cki import cache as kernel_cache
from cki import driver, dtypes
from cki.device import DeviceInfo
from cki.heuristics import linear_decode as heuristics
from cki.kernel import KernelSpec
from cki.operand import Operand, dense
from cki.ops.call import call
from cki.ops.linear_decode import Norm, plan_linear_decode
from cki.ops.spec import Attribute, Input, OpSpec, OutputSpec, Problem
from cki.plan import Plan

EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class Product:
    """y [tokens, columns] of x [tokens, depth]; gated: w has gate and up below one another."""

    depth: int
    columns: int
    norm: bool = False
    gated: bool = False

    @property
    def rows(self) -> int:
        """Of w."""
        return self.columns * (2 if self.gated else 1)

    def weight_bytes(self, codes: bool) -> int:
        scales = -(-self.rows // 128) * -(-self.depth // 128) * 4 if codes else 0
        return self.rows * self.depth * (1 if codes else 2) + scales


#: Of Qwen3-8B.
PRODUCTS = {
    "qkv": Product(4096, 6144, norm=True),
    "out": Product(4096, 4096),
    "gate_up": Product(4096, 12288, norm=True, gated=True),
    "down": Product(12288, 4096),
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to launch.  serial: after the launch ahead has ended.  The rest: of `plan_linear_decode`."""

    serial: bool = False
    stages: int | None = None
    split: int | None = None

    def __str__(self) -> str:
        words = {
            "serial": self.serial,
            f"{self.stages} stages": self.stages,
            f"split {self.split}": self.split,
        }
        return " ".join(("cki", *filter(words.get, words)))

    def tokens_a_launch(self, product: Product, tokens: int, itemsize: int, device: DeviceInfo) -> int:
        """All, or as many as fit."""
        split = self.split or heuristics.split(product.depth, itemsize, device, norm=product.norm)
        return next(
            n for n in (tokens, 8, 4, 2, 1)
            if not heuristics.obstacles(n, product.depth, itemsize, device, norm=product.norm, split=split)
        )  # fmt: skip

    def plan(self, product: Product, operands: dict[str, Operand | None], device: DeviceInfo) -> Plan:
        """The launches of one product: parts of the tokens, where all do not fit."""
        x, w, y = operands["x"], operands["w"], operands["y"]
        assert x is not None
        assert w is not None
        assert y is not None
        tokens, itemsize, steps = x.shape[0], w.dtype.itemsize, []
        count = self.tokens_a_launch(product, tokens, itemsize, device)
        gamma, residual = operands["gamma"], operands["residual"]
        for first in range(0, tokens, count):
            part = min(count, tokens - first)
            step, = plan_linear_decode(
                _rows(x, first, part), w, None, residual and _rows(residual, first, part), _rows(y, first, part),
                device, norm=Norm(gamma, EPSILON) if gamma else None, gated=product.gated,
                activation="silu" if product.gated else None, scales=operands["scales"],
                stages=self.stages, split=self.split,
            )  # fmt: skip
            steps.append(dataclasses.replace(step, programmatic=not self.serial))
        return Plan(tuple(steps))

    def spec(self, product: Product) -> OpSpec:
        def infer(problem: Problem) -> dict[str, OutputSpec]:
            return {"y": OutputSpec((problem["x"].shape[0], product.columns), problem["x"].dtype)}

        return OpSpec(
            "linear_decode",
            (Input("x"), Input("w"), Input("scales", True), Input("residual", True), Input("gamma", True)),
            (Attribute("variant", str),), ("y",), lambda problem: None, infer,
            lambda problem, outputs, device: self.plan(product, {**problem.operands, **outputs}, device),
        )  # fmt: skip


def _rows(operand: Operand, first: int, count: int) -> Operand:
    width = operand.shape[1]
    return operand.view((count, width), (width, 1), first * width)


def make_inputs(product: Product, tokens: int, codes: bool, seed: int) -> tuple[Any, ...]:
    """x, w, scales, residual, gamma, y."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    x, w, scales = normal(tokens, product.depth), normal(product.rows, product.depth), None
    if codes:
        w = (w * 50).to(torch.float8_e4m3fn)
        blocks = (-(-product.rows // 128), -(-product.depth // 128))
        scales = torch.rand(blocks, generator=generator, device="cuda") * 2e-4 + 2e-4
    else:
        w *= product.depth**-0.5
    gamma = 1 + normal(product.depth) / 8 if product.norm else None
    residual = None if product.norm else normal(tokens, product.columns)
    return x, w, scales, residual, gamma, torch.empty(tokens, product.columns, device="cuda", dtype=x.dtype)


def expected(product: Product, inputs: tuple[Any, ...]) -> tuple[Any, float]:
    """The product in float64, and how far off y may be: twice the error of the same with each operation rounded."""
    import torch

    x, w, scales, residual, gamma, _ = inputs
    results, weight = [], w.double()
    if scales is not None:
        by_rows = scales.double().repeat_interleave(128, 0)[: product.rows]
        weight *= by_rows.repeat_interleave(128, 1)[:, : product.depth]
    for kept in (torch.float64, torch.bfloat16):

        def rounded(value: Any, kept: Any = kept) -> Any:
            return value.to(kept).double()

        n = x.double()
        if gamma is not None:
            n = rounded(n * torch.rsqrt((n * n).mean(-1, keepdim=True) + EPSILON) * gamma.double())
        value = rounded(n @ weight.T)
        if product.gated:
            gate, up = value.chunk(2, -1)
            value = rounded(torch.nn.functional.silu(gate) * up)
        results.append(rounded(value + (0 if residual is None else residual.double())))
    truth, plain = results
    return truth, 2 * (plain - truth).abs().max().item() + 1e-5 * truth.abs().max().item()


def variants_of(product: Product, tokens: int, codes: bool, probe: bool, device: DeviceInfo) -> list[Variant]:
    """The choice, and with `probe` others that fit."""
    if not probe:
        return [Variant()]
    itemsize = 1 if codes else 2
    split = heuristics.split(product.depth, itemsize, device, norm=product.norm)
    norm, room = product.norm, device.shared_memory_per_block - 4096
    count = Variant().tokens_a_launch(product, tokens, itemsize, device)
    rings = [
        ring for ring in (3, 4, 6, 8)
        if heuristics.shared_memory(count, product.depth, itemsize, ring, norm=norm, split=split) <= room
        and ring != heuristics.stages(count, product.depth, itemsize, device, norm=norm, split=split)
    ]  # fmt: skip
    splits = () if product.norm else (Variant(split=1), Variant(split=2))
    return [Variant(), Variant(serial=True), *(Variant(stages=ring) for ring in rings), *splits]


def compile_ahead(
    products: Sequence[Product], tokens: Sequence[int], weights: Sequence[bool], probe: bool
) -> None:
    """All kernels, side by side: the compiler runs without Python's lock."""
    device = driver.device_info(0)
    kernels: dict[KernelSpec, None] = {}
    for product in products:
        for count in tokens:
            for codes in weights:
                w = dense("w", (product.rows, product.depth), dtypes.e4m3 if codes else dtypes.bf16)
                blocks = (-(-product.rows // 128), -(-product.depth // 128))
                operands: dict[str, Operand | None] = {
                    "x": dense("x", (count, product.depth), dtypes.bf16), "w": w,
                    "scales": dense("scales", blocks, dtypes.f32) if codes else None,
                    "residual": None if product.norm else dense("r", (count, product.columns), dtypes.bf16),
                    "gamma": dense("gamma", (product.depth,), dtypes.bf16) if product.norm else None,
                    "y": dense("y", (count, product.columns), dtypes.bf16),
                }  # fmt: skip
                for variant in variants_of(product, count, codes, probe, device):
                    kernels |= {step.kernel: None for step in variant.plan(product, operands, device).steps}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda kernel: kernel_cache.get(kernel, device.arch), kernels))


def measure(
    name: str, tokens: int, codes: bool, variants: Sequence[Variant], copy: float
) -> list[dict[str, Any]]:
    """Rows of the result for one product."""
    product, kind = PRODUCTS[name], "e4m3" if codes else "bf16"
    nbytes = product.weight_bytes(codes)
    inputs = common.rotated(lambda seed: make_inputs(product, tokens, codes, seed), nbytes)
    truth, limit = expected(product, inputs[0])
    problem = f"{name} {tokens}x{product.depth}x{product.rows}"
    runs = {}
    for variant in variants:
        spec = variant.spec(product)

        def run(*t: Any, spec: OpSpec = spec, variant: Variant = variant) -> Any:
            return call(spec, t[:5], (str(variant),), (t[5],))

        y = inputs[0][5]
        y.fill_(float("nan"))
        run(*inputs[0])
        error = (y.double() - truth).abs().max().item()
        if not error <= limit:
            raise SystemExit(f"{problem} {kind} {variant}: error {error:.3g}, allowed {limit:.3g}")
        runs[str(variant)] = run
    itemsize, device = 1 if codes else 2, driver.device_info(0)
    launches = -(-tokens // Variant().tokens_a_launch(product, tokens, itemsize, device))
    return [
        common.row(
            "linear_decode",
            problem,
            kind,
            variant,
            timing,
            nbytes=nbytes,
            tokens=tokens,
            launches=launches,
            of_copy=round(nbytes / timing.median_us / 1e3 / copy, 3),
            copy_gb_per_s=round(copy, 1),
        )
        for variant, timing in common.graph_times_in_turn(runs, inputs, rounds=10).items()
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--product", nargs="+", choices=list(PRODUCTS), default=list(PRODUCTS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--weights", nargs="+", choices=["bf16", "e4m3"], default=["bf16", "e4m3"])
    parser.add_argument("--probe", action="store_true", help="also other ways to launch")
    options = parser.parse_args(argv)
    common.require_gpu()
    weights = [kind == "e4m3" for kind in options.weights]
    compile_ahead([PRODUCTS[name] for name in options.product], options.tokens, weights, options.probe)
    device = driver.device_info(0)
    copy = common.copy_rate()
    rows = []
    for codes in weights:
        for name in options.product:
            for tokens in options.tokens:
                variants = variants_of(PRODUCTS[name], tokens, codes, options.probe, device)
                rows += measure(name, tokens, codes, variants, copy)
    common.write_csv("gemm_decode", rows)


if __name__ == "__main__":
    main()
