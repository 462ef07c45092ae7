"""How an engine is set up: sizes, types, device.  `LLM` says what each option means."""

from __future__ import annotations

from dataclasses import dataclass

from cki import dtypes
from cki.device import DeviceInfo, cuda_device, current, sim_device
from cki.dtypes import DType
from cki.engine.config import ModelConfig
from cki.engine.model import ModelLimits
from cki.errors import InvalidArgumentError, UnsupportedError

_DTYPES = ("f32", "f16", "bf16")
#: The longest sequence where nothing else is asked for.
_DEFAULT_LENGTH = 8192


@dataclass(frozen=True)
class EngineOptions:
    """Options of `LLM`, checked."""

    dtype: str | None = None
    device: str | None = None
    max_length: int | None = None
    max_sequences: int = 64
    max_step_tokens: int = 2048
    block_size: int = 16
    cache_nbytes: int | None = None
    graphs: bool = True
    quantize: str | None = None
    kv_dtype: str | None = None

    def __post_init__(self) -> None:
        names = ("max_length", "max_sequences", "max_step_tokens", "block_size", "cache_nbytes")
        optional = ("max_length", "cache_nbytes")
        values = {name: getattr(self, name) for name in names}
        problems = [
            f"{name} is {value!r}, not an integer of 1 or more"
            for name, value in values.items()
            if not (value is None and name in optional)
            and (not isinstance(value, int) or isinstance(value, bool) or value < 1)
        ]
        if self.dtype is not None and self.dtype not in _DTYPES:
            problems.append(f"dtype is {self.dtype!r}, not one of {', '.join(_DTYPES)}, or None")
        if self.quantize not in (None, "fp8"):
            problems.append(f"quantize is {self.quantize!r}, neither 'fp8' nor None")
        if self.kv_dtype not in (None, "e4m3"):
            problems.append(f"kv_dtype is {self.kv_dtype!r}, neither 'e4m3' nor None")
        if not isinstance(self.graphs, bool):
            problems.append(f"graphs is {self.graphs!r}, not a bool")
        if problems:
            raise InvalidArgumentError("an engine cannot be set up so", problems)

    def device_info(self) -> DeviceInfo:
        """The device that is named, or CKI_DEVICE's choice."""
        if self.device is None:
            return current() if current().kind == "sim" else cuda_device(0)
        if self.device == "sim":
            return sim_device()
        kind, _, index = str(self.device).partition(":")
        if kind != "cuda" or not (index.isdigit() or not index):
            raise InvalidArgumentError(f"device is {self.device!r}", hint='"sim", "cuda", "cuda:1" or None')
        return cuda_device(int(index or 0))

    def limits(self, config: ModelConfig) -> ModelLimits:
        """Sizes for a model.  Refuses a max_length that the model was not made for."""
        length = min(config.max_position, _DEFAULT_LENGTH) if self.max_length is None else self.max_length
        if length > config.max_position:
            raise InvalidArgumentError(
                f"max_length is {length}, but the model was made for sequences of {config.max_position} tokens",
                hint=f"at most {config.max_position}, or RoPE scaling in the model's configuration",
            )
        return ModelLimits(self.max_sequences, self.max_step_tokens, length)

    def element_type(self, config: ModelConfig, device: DeviceInfo) -> DType:
        """Of weights, activations and cache: the model's own, on the simulated device f16 for bf16 too."""
        chosen = "f16" if device.kind == "sim" and config.dtype != "f32" else config.dtype
        dtype = dtypes.from_name(self.dtype or chosen)
        if (self.quantize or self.kv_dtype) and dtype == dtypes.f32:
            raise InvalidArgumentError(
                "e4m3 weights or cache with activations of f32", hint="dtype='bf16' or dtype='f16'"
            )
        if self.kv_dtype and device.arch == "sm_80":
            raise UnsupportedError(
                "kv_dtype='e4m3'", [f"{device} has no conversions from e4m3"], "no kv_dtype"
            )
        return dtype
