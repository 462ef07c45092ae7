"""The headers as text: both sides define the same functions, each has a test kernel and compiles where it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cki import compiler, dtypes, source
from cki._checkout import cuda_src
from cki.errors import CompileError
from cki.kernel import ARCHITECTURES, KernelSpec
from tests.ptx.operands import KERNELS

DEVICE = cuda_src() / "ptx"
SIMULATED = cuda_src() / "sim" / "ptx"
FUNCTION = re.compile(r"^__device__ __forceinline__ (?:constexpr )?[\w:]+ (\w+)\(", re.MULTILINE)
HEADERS = sorted(path.name for path in DEVICE.glob("*.cuh"))


def functions(path: Path) -> set[str]:
    """Names of the public functions that a header defines."""
    text = re.sub(r"namespace detail \{.*?\n\}  // namespace detail", "", path.read_text(), flags=re.DOTALL)
    return set(FUNCTION.findall(text))


@pytest.mark.parametrize("header", HEADERS)
def test_both_sides_define_the_same_functions(header: str) -> None:
    simulated = SIMULATED / header
    if not simulated.exists():  # no instruction in it: the simulated device reads the same file
        assert not functions(DEVICE / header)
        return
    assert functions(DEVICE / header) == functions(simulated)


def test_every_function_has_a_test_kernel() -> None:
    text = "".join(path.read_text() for path in KERNELS.glob("*.cu"))
    called = set(re.findall(r"ptx::(\w+)", text))
    missing = {name for header in HEADERS for name in functions(DEVICE / header)} - called
    # composed of tested ones
    assert missing <= {"mbarrier_wait_parity", "cluster_sync"}, (
        f"no kernel of tests/ptx/kernels calls {missing}"
    )


def compile_kernel(file: str, entry: str, arch: str, **constants: int | dtypes.DType) -> compiler.Compiled:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC")
    spec = KernelSpec(str(KERNELS / file), entry, tuple(sorted(constants.items())), "", ARCHITECTURES)
    return compiler.compile_text(source.full_source(spec), file, arch, compiler.options(arch))


FROM_SM_90 = ("sm_90a", "sm_100a", "sm_120a")
BUILDS = [
    ("ampere.cu", "ampere", ARCHITECTURES, {}),
    ("math.cu", "approximate", ARCHITECTURES, {}),
    ("math.cu", "larger", ARCHITECTURES, {}),
    ("memory.cu", "accesses", ARCHITECTURES, {}),
    ("convert.cu", "convert", ARCHITECTURES[1:], {}),
    ("mma.cu", "products", ARCHITECTURES[1:], {}),
    ("matrices.cu", "matrices", FROM_SM_90, {}),
    ("cp_async.cu", "copies", FROM_SM_90, {}),
    ("mbarrier.cu", "phases", FROM_SM_90, {}),
    ("bulk.cu", "bulk_copies", FROM_SM_90, {}),
    ("tma.cu", "tile_copy", FROM_SM_90, {}),
    ("cluster.cu", "clusters", FROM_SM_90[:2], {"kBlocks": 2}),  # ptxas advises against multicast on sm_120
    ("control.cu", "control", FROM_SM_90, {}),
    ("wgmma.cu", "products", ("sm_90a",), {"kN": 128, "Element": dtypes.from_name("bf16")}),
    ("wgmma.cu", "products", ("sm_90a",), {"kN": 32, "Element": dtypes.from_name("e4m3")}),
]


@pytest.mark.parametrize(
    ("file", "entry", "arch", "constants"),
    [
        pytest.param(
            file, entry, arch, constants, id="-".join([file, arch, *(str(v) for v in constants.values())])
        )
        for file, entry, archs, constants in BUILDS
        for arch in archs
    ],
)
def test_kernels_compile_without_complaint(
    file: str, entry: str, arch: str, constants: dict[str, int]
) -> None:
    report = compile_kernel(file, entry, arch, **constants).report
    # C7508: setmaxnreg ignored, C7510: wgmma serialised, C7517 and C7519: a missing wait or fence repaired
    assert not report.messages, report.messages
    assert not report.warnings, report.warnings
    assert all(kernel.spill_store_bytes == 0 for kernel in report.kernels)


@pytest.mark.parametrize(
    ("file", "entry", "arch", "constants", "words"),
    [
        ("mma.cu", "products", "sm_80", {}, "mma with e4m3 operands needs sm_89"),
        ("convert.cu", "convert", "sm_80", {}, "conversion to e4m3 needs sm_89"),
        ("matrices.cu", "matrices", "sm_89", {}, "stmatrix needs sm_90"),
        ("tma.cu", "tile_copy", "sm_89", {}, "tensor copies need sm_90"),
        ("cluster.cu", "clusters", "sm_80", {"kBlocks": 2}, "clusters need sm_90"),
        (
            "wgmma.cu",
            "products",
            "sm_100a",
            {"kN": 8, "Element": dtypes.from_name("bf16")},
            "wgmma needs sm_90a",
        ),
    ],
)
def test_older_architectures_are_refused_by_name(file, entry, arch, constants, words) -> None:
    with pytest.raises(CompileError, match=words):
        compile_kernel(file, entry, arch, **constants)
