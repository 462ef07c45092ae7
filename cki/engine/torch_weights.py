"""The weights of a model of transformers where torch has them: one copy, which both use.

The engine wants Q, K and V in one matrix, and gate and up.  So their parameters are put side by side in one new tensor
each, layer by layer, and become views of it: the model computes what it did, and takes no more memory than before.  All
other weights stay where they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cki import dtypes
from cki.device import DeviceInfo
from cki.dtypes import DType
from cki.engine.config import ModelConfig
from cki.engine.device_memory import DeviceTensors
from cki.engine.device_weights import HasView, source_names, weight_shapes
from cki.engine.rope import cos_sin_table, products_rotate
from cki.errors import InvalidArgumentError, InvalidTypeError
from cki.tensor import TensorView

_FLOATS = (dtypes.f32, dtypes.f16, dtypes.bf16)


class _Lent:
    """A torch tensor by its address; `view.owner` keeps its memory."""

    def __init__(self, tensor: Any) -> None:
        from cki.adapter import adapter_of

        self.view: TensorView = adapter_of(tensor).view(tensor)


class TorchWeights:
    """Weights of a torch module (see `cki.engine.device_weights.ModelWeights`).

    Raises InvalidTypeError for what is no such module, InvalidArgumentError with every weight that is missing or of
    another shape, type or device than the rest.
    """

    def __init__(self, model: Any, config: ModelConfig, device: DeviceInfo, positions: int) -> None:
        import torch

        if not isinstance(model, torch.nn.Module):
            raise InvalidTypeError(f"model is a {type(model).__name__}, not a torch.nn.Module")
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self.positions = positions
        self.fp8 = False
        self.dtype: DType = _checked(parameters, config, device)
        self._tensors: list[tuple[str, HasView]] = []
        self.nbytes = 0
        with torch.no_grad():
            for role in weight_shapes(config):
                tensor = _together([parameters[name] for name in source_names(role)])
                self.nbytes += tensor.numel() * tensor.element_size()
                self._tensors.append((role, _Lent(tensor)))
            if device.kind == "cuda":
                torch.cuda.synchronize(device.index)  # the engine's stream waits for no other
        table = cos_sin_table(config, positions, always=products_rotate(config, self.dtype, device))
        if table is not None:
            own = DeviceTensors(device, [("cos_sin", table.shape, dtypes.f32)])
            own.write("cos_sin", table)
            own.finish()
            self._tensors.append(("cos_sin", own["cos_sin"]))

    def items(self) -> Sequence[tuple[str, HasView]]:
        """Roles and tensors."""
        return self._tensors


def torch_device(model: Any) -> str:
    """Where a module's parameters lie, as `LLM` names devices."""
    device = next((parameter.device for parameter in model.parameters()), None)
    if device is None or device.type not in ("cuda", "cpu"):
        raise InvalidArgumentError(
            f"the model's parameters are on {device}", hint='on a GPU: model.to("cuda")'
        )
    return "sim" if device.type == "cpu" else f"cuda:{device.index or 0}"


def _together(parameters: Sequence[Any]) -> Any:
    """One dense tensor of the parameters' rows, which they become views of; a parameter alone stays if it can."""
    import torch

    if len(parameters) == 1:
        data = parameters[0].data
        if not data.is_contiguous() or data.data_ptr() % 16:
            parameters[0].data = data = data.clone(memory_format=torch.contiguous_format)
        return data
    fused = torch.cat([parameter.data for parameter in parameters])
    first = 0
    for parameter in parameters:
        rows = len(parameter)
        parameter.data = fused[first : first + rows]
        first += rows
    return fused


def _checked(parameters: Mapping[str, Any], config: ModelConfig, device: DeviceInfo) -> DType:
    """The one element type of all weights."""
    problems = []
    kinds: dict[str, str] = {}
    for role, shape in weight_shapes(config).items():
        names = source_names(role)
        missing = [name for name in names if name not in parameters]
        problems += [f"{name} is missing" for name in missing]
        if missing:
            continue
        found = [tuple(parameters[name].shape) for name in names]
        if sum(int(np.prod(one)) for one in found) != np.prod(shape) or any(
            one[1:] != shape[1:] for one in found
        ):
            problems.append(
                f"{' + '.join(names)} has shape {' + '.join(map(str, found))}, together not {shape}"
            )
        for name in names:
            kind = f"{str(parameters[name].dtype).removeprefix('torch.')} on {parameters[name].device}"
            kinds.setdefault(kind, name)
    if len(kinds) > 1:
        problems.append(", ".join(f"{name} is {kind}" for kind, name in kinds.items()) + ": not all alike")
    if problems:
        raise InvalidArgumentError(
            "these parameters are no model that the engine runs", problems, "a Llama, Mistral, Qwen2 or Qwen3 of "
            "transformers, whole, on one device and of one type",
        )  # fmt: skip
    dtype_name, _, place = next(iter(kinds)).partition(" on ")
    dtype = dtypes.from_name(dtype_name)
    if dtype not in _FLOATS:
        raise InvalidTypeError(f"the weights are {dtype_name}", hint="f32, f16 or bf16")
    if place.startswith("cpu") != (device.kind == "sim"):
        raise InvalidArgumentError(
            f"the weights are on {place}, the engine on {device}", hint="both on one device"
        )
    return dtype
