"""A decoder's products, with the norms before and the gates behind them: the launches that compute each.

tokens       weights of the model's type                     e4m3 codes with scales of 128 x 128 blocks
to 8         linear_decode; before Hopper of small weights   linear_decode: W8A16
to 16        rms_norm, linear, gated_linear                  the same
more         the same                                        linear_fp8 on rows quantised by 128s: W8A8 (sm_90a);
                                                             elsewhere linear_decode, 16 tokens after the other

Decode steps of codes, and of more than 8 tokens in bf16, have another form where they can (`cki.engine.layer_plan`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from cki import dtypes
from cki.device import DeviceInfo
from cki.errors import UnsupportedError
from cki.heuristics.linear_decode import MAX_TOKENS
from cki.heuristics.linear_skinny import MIN_WEIGHT_BYTES
from cki.operand import Operand, dense
from cki.ops.few_rows import Rows
from cki.ops.gated_linear import plan_gated_linear
from cki.ops.linear import plan_linear
from cki.ops.linear_decode import Norm, decode_obstacles, plan_linear_decode
from cki.ops.linear_fp8 import plan_linear_fp8
from cki.ops.norm import plan_rms_norm
from cki.ops.norm_quantize import plan_norm_quantize
from cki.ops.pointwise import plan_gated_activation
from cki.ops.pointwise_quantize import plan_quantize_fp8
from cki.plan import Plan, Step

_BLOCK = 128
_PROJECTED = "projected"
#: Architectures of `linear_fp8`.
_HOPPER = ("sm_90a",)
#: Tokens up to which `linear_decode` is better than launches apart of large weights (an H200).
DECODE_TOKENS = 8


#: How products of few tokens are launched: see `Products`.
Way = Literal["plain", "decode"]


class Weight(NamedTuple):
    """A matrix [rows, K].  scales: of its blocks, where it holds e4m3 codes."""

    w: Operand
    bias: Operand | None = None
    scales: Operand | None = None


@dataclass(frozen=True)
class Stream:
    """The rows that layers add to: x, and where `pending`, delta beside it, which the next norm adds to x first.

    rows: x times the next norm's gamma, where the launch that completed x has made that.
    """

    x: Operand
    delta: Operand | None = None
    pending: bool = False
    rows: Rows | None = None


@dataclass(frozen=True)
class Products:
    """Plans products of one step, over memory named "normed", and for codes "codes" and "code_scales".

    way: of products of few tokens: "decode" takes norms, gates and residual into `linear_decode`, where that can;
    "plain" keeps them apart (but for codes of few tokens); None: what is best.
    """

    device: DeviceInfo
    way: Way | None = None

    def project(self, stream: Stream, norm: Norm, weight: Weight, y: Operand) -> tuple[Step, ...]:
        """y = norm(stream) @ w.T + bias."""
        x = stream.x
        if not stream.pending and self._few(x, weight):
            return self._in_parts(x, weight, y, norm=norm)
        if weight.scales is not None:
            codes = self._codes(x.shape)
            return self._quantised(stream, norm, codes) + self._w8a8(codes, weight, y)
        steps, normed = self._normalised(stream, norm)
        return steps + plan_linear(
            normed, weight.w, weight.bias, None, y, self.device, weight_layout="out_in"
        )

    def gate(self, stream: Stream, norm: Norm, weight: Weight, y: Operand, activation: str) -> Plan:
        """y = activation(gate) * up, [gate | up] = norm(stream) @ w.T + bias."""
        x = stream.x
        if not stream.pending and self._few(x, weight):
            return Plan(self._in_parts(x, weight, y, norm=norm, activation=activation, gated=True))
        if weight.scales is not None:
            projected = dense(_PROJECTED, (y.shape[0], 2 * y.shape[1]), y.dtype)
            steps = self.project(stream, norm, weight, projected)
            steps += plan_gated_activation(projected, None, y, self.device, activation=activation)
            return Plan(steps, ((_PROJECTED, projected.size * y.dtype.itemsize),))
        steps, normed = self._normalised(stream, norm)
        plan = plan_gated_linear(
            normed, weight.w, weight.bias, y, self.device, activation=activation, weight_layout="out_in"
        )
        return Plan(steps + plan.steps, plan.workspace)

    def add(self, stream: Stream, z: Operand, weight: Weight) -> tuple[tuple[Step, ...], Stream]:
        """stream += z @ w.T + bias: the launches, and the stream behind them."""
        x = stream.x
        if self._few(z, weight):
            return self._in_parts(z, weight, x, residual=x), stream
        if weight.scales is not None:
            codes, scales = self._codes(z.shape)
            steps = plan_quantize_fp8(z, codes, scales, self.device, granularity="block128")
            assert stream.delta is not None
            assert not stream.pending
            return steps + self._w8a8((codes, scales), weight, stream.delta), replace(stream, pending=True)
        return plan_linear(z, weight.w, weight.bias, x, x, self.device, weight_layout="out_in"), stream

    def _few(self, x: Operand, weight: Weight) -> bool:
        """Whether norms, gates and residual go into a product."""
        if weight.scales is not None:
            return x.shape[0] <= MAX_TOKENS or self.device.arch not in _HOPPER
        y = dense("y", (x.shape[0], weight.w.shape[0]), x.dtype)
        is_small = weight.w.size * weight.w.dtype.itemsize < MIN_WEIGHT_BYTES
        is_better = is_small or (x.shape[0] <= DECODE_TOKENS and self.device.arch in _HOPPER)
        wanted = is_better if self.way is None else self.way == "decode"
        return wanted and not decode_obstacles(x, weight.w, y, self.device)

    def _in_parts(
        self, x: Operand, weight: Weight, y: Operand, *, norm: Norm | None = None, residual: Operand | None = None,
        activation: str | None = None, gated: bool = False,
    ) -> tuple[Step, ...]:  # fmt: skip
        """By `linear_decode`, as many tokens a launch as it takes."""
        for size in (min(x.shape[0], MAX_TOKENS), 8, 4, 2, 1):
            first = _rows(x, 0, min(size, x.shape[0])), _rows(y, 0, min(size, x.shape[0]))
            obstacles = decode_obstacles(
                first[0], weight.w, first[1], self.device, norm=norm, gated=gated, scales=weight.scales
            )
            if not obstacles:
                break
        steps: tuple[Step, ...] = ()
        for start in range(0, x.shape[0], size):
            count = min(size, x.shape[0] - start)
            steps += plan_linear_decode(
                _rows(x, start, count), weight.w, weight.bias, residual and _rows(residual, start, count),
                _rows(y, start, count), self.device, norm=norm, activation=activation, gated=gated,
                scales=weight.scales,
            )  # fmt: skip
        return steps

    def _normalised(self, stream: Stream, norm: Norm) -> tuple[tuple[Step, ...], Operand]:
        x, delta = stream.x, stream.delta
        normed = dense("normed", x.shape, x.dtype)
        if stream.pending:
            assert delta is not None
            return plan_rms_norm(
                delta, norm.gamma, normed, self.device, residual=x, residual_out=x, eps=norm.eps
            ), normed
        return plan_rms_norm(x, norm.gamma, normed, self.device, eps=norm.eps), normed

    def _codes(self, shape: tuple[int, ...]) -> tuple[Operand, Operand]:
        """Memory for rows as e4m3, and for their scales."""
        rows, width = shape
        return dense("codes", shape, dtypes.e4m3), dense(
            "code_scales", (rows, -(-width // _BLOCK)), dtypes.f32
        )

    def _quantised(self, stream: Stream, norm: Norm, codes: tuple[Operand, Operand]) -> tuple[Step, ...]:
        """codes of norm(stream), by 128 neighbours."""
        x, delta = stream.x, stream.delta
        added = x if stream.pending else None
        source = delta if stream.pending and delta is not None else x
        try:
            return plan_norm_quantize(
                source, (norm.gamma, None), *codes, self.device, centred=False, granularity="block128",
                eps=norm.eps, residual=added, residual_out=added,
            )  # fmt: skip
        except UnsupportedError:  # rows that are no whole blocks
            steps, normed = self._normalised(stream, norm)
            return steps + plan_quantize_fp8(normed, *codes, self.device, granularity="block128")

    def _w8a8(self, codes: tuple[Operand, Operand], weight: Weight, y: Operand) -> tuple[Step, ...]:
        assert weight.scales is not None
        return plan_linear_fp8(
            *codes, weight.w, weight.scales, weight.bias, y, self.device, weights_early=True
        )


def _rows(operand: Operand, first: int, count: int) -> Operand:
    """Rows of a dense matrix."""
    width = operand.shape[1]
    return operand.view((count, width), (width, 1), first * width)
