"""KernelSpec: everything that decides a compiled kernel, frozen and hashable."""

from __future__ import annotations

from dataclasses import dataclass

from cki.dtypes import DType

#: What a prelude constant may be: `constexpr bool/int/long long/float` or, for a DType, `using Name = type`.
ConstantValue = bool | int | float | DType

#: All architectures that CKI compiles for; an "a" arch also runs the plain kernels of its number.
ARCHITECTURES = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a")


@dataclass(frozen=True)
class KernelSpec:
    """One kernel, specialised.

    source: path of the .cu file below `cuda_src` (forward slashes), or an absolute path (a user's own kernel).
    entry: the name of its `extern "C" __global__` function.
    constants: (name, value) pairs, sorted by name: the prelude put in front of the source.
    params: one letter a kernel parameter, in order: P pointer, i int32, I uint32, q int64, Q uint64, f float32,
        d float64, T 128-byte tensor map by value.
    archs: architectures it compiles for (a subset of ARCHITECTURES).
    max_registers: its stated register budget a thread; the compile test fails above it.
    """

    source: str
    entry: str
    constants: tuple[tuple[str, ConstantValue], ...]
    params: str
    archs: tuple[str, ...] = ARCHITECTURES
    max_registers: int = 255

    def constant(self, name: str) -> ConstantValue:
        """The value of one prelude constant."""
        return dict(self.constants)[name]


def kernel_spec(
    source: str,
    entry: str,
    params: str,
    *,
    archs: tuple[str, ...] = ARCHITECTURES,
    max_registers: int = 255,
    **constants: ConstantValue,
) -> KernelSpec:
    """A KernelSpec from keyword constants: `kernel_spec("norm/layer_norm.cu", "layer_norm", "PPPPii", kWidth=1024)`."""
    return KernelSpec(source, entry, tuple(sorted(constants.items())), params, archs, max_registers)
