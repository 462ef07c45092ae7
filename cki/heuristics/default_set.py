"""The kernels that `import cki` compiles ahead of time: what most models ask for first.

Norms of width 1024 and 4096, attention with head dimensions 64 and 128 (causal and not), and linear layers with and
without GELU, in both 16-bit types.  Anything else is compiled at its first call, in a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cki import dtypes
from cki.device import DeviceInfo
from cki.dtypes import DType
from cki.kernel import KernelSpec
from cki.operand import dense
from cki.ops.spec import OpSpec, Problem
from cki.plan import Plan


def plan_offline(
    spec: OpSpec, shapes: Mapping[str, tuple[int, ...]], dtype: DType, device: DeviceInfo, **attributes: Any
) -> Plan:
    """The plan of a problem given by shapes alone; attributes left out have their defaults."""
    operands = {
        item.name: dense(item.name, shapes[item.name], dtype) if item.name in shapes else None
        for item in spec.inputs
    }
    values = {
        attribute.name: attributes.get(attribute.name, attribute.default) for attribute in spec.attributes
    }
    problem = Problem(operands, values)
    spec.check(problem)
    assert not problem.violations, problem.violations
    outputs = {
        name: dense(name, tuple(output.shape), output.dtype) for name, output in spec.infer(problem).items()
    }
    return spec.plan(problem, outputs, device)


def default_kernels(device: DeviceInfo) -> list[KernelSpec]:
    """The default set for a device, the cheapest to compile first."""
    from cki.ops.attention import ATTENTION
    from cki.ops.linear import LINEAR
    from cki.ops.norm import LAYER_NORM, RMS_NORM

    plans: list[Plan] = []
    for dtype in (dtypes.bf16, dtypes.f16):
        for width in (1024, 4096):
            x, w = (4096, width), (width,)
            plans.append(plan_offline(LAYER_NORM, {"x": x, "weight": w, "bias": w}, dtype, device))
            plans.append(plan_offline(RMS_NORM, {"x": x, "weight": w}, dtype, device))
            plans.append(plan_offline(RMS_NORM, {"x": x, "weight": w, "residual": x}, dtype, device))
    for dtype in (dtypes.bf16, dtypes.f16):
        matrices = {"x": (4096, 4096), "w": (4096, 4096)}
        plans.append(plan_offline(LINEAR, matrices, dtype, device))
        plans.append(plan_offline(LINEAR, {**matrices, "bias": (4096,)}, dtype, device, activation="gelu"))
        for head_dim in (64, 128):
            heads = dict.fromkeys(("q", "k", "v"), (2, 2048, 16, head_dim))
            for causal in (False, True):
                plans.append(plan_offline(ATTENTION, heads, dtype, device, causal=causal))
    return list(dict.fromkeys(step.kernel for plan in plans for step in plan.steps))
