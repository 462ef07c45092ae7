"""A decoder's products, with the norms before and the gates behind them: the launches that compute each.

For few tokens they may be one launch (`cki.ops.linear_decode`), else `rms_norm`, `linear`, `gated_linear`.
"""

from __future__ import annotations

from typing import NamedTuple

from cki.device import DeviceInfo
from cki.operand import Operand
from cki.ops.gated_linear import plan_gated_linear
from cki.ops.linear import plan_linear
from cki.ops.linear_decode import Norm, decode_obstacles, plan_linear_decode
from cki.ops.norm import plan_rms_norm
from cki.plan import Plan, Step


class Products(NamedTuple):
    """How a step plans its products.

    normed: memory for rows that a launch of its own normalises.  fused: one launch, where that can be.
    """

    device: DeviceInfo
    normed: Operand
    fused: bool

    def linear(
        self, x: Operand, w: Operand, bias: Operand | None, residual: Operand | None, y: Operand,
        norm: Norm | None = None,
    ) -> tuple[Step, ...]:  # fmt: skip
        """y = norm(x) @ w.T + bias + residual."""
        if self.fused and not decode_obstacles(x, w, y, self.device, norm=norm):
            return plan_linear_decode(x, w, bias, residual, y, self.device, norm=norm)
        steps, x = self._normalised(x, norm)
        return steps + plan_linear(x, w, bias, residual, y, self.device, weight_layout="out_in")

    def gated(
        self, x: Operand, w: Operand, bias: Operand | None, y: Operand, norm: Norm, activation: str
    ) -> Plan:
        """y = activation(gate) * up, gate and up of norm(x)."""
        if self.fused and not decode_obstacles(x, w, y, self.device, norm=norm, gated=True):
            return Plan(plan_linear_decode(
                x, w, bias, None, y, self.device, norm=norm, activation=activation, gated=True
            ))  # fmt: skip
        steps, x = self._normalised(x, norm)
        plan = plan_gated_linear(x, w, bias, y, self.device, activation=activation, weight_layout="out_in")
        return Plan(steps + plan.steps, plan.workspace)

    def _normalised(self, x: Operand, norm: Norm | None) -> tuple[tuple[Step, ...], Operand]:
        if norm is None:
            return (), x
        return plan_rms_norm(x, norm.gamma, self.normed, self.device, eps=norm.eps), self.normed
