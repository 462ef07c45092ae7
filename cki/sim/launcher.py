"""Launching a kernel on the simulated device.  The call returns when the grid has ended."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from cki import config
from cki.errors import InvalidArgumentError, SimulationError
from cki.sim import dwarf, runtime
from cki.sim.checking import Checks, current
from cki.sim.kernel import DYNAMIC_AREA, LoadedKernel, SimKernel

#: Threads that clusters and cooperative launches may keep resident at once, and with race checks.
MAX_CORESIDENT_THREADS = 24576
MAX_RACE_THREADS = 4096
MAX_CLUSTER = 16


def os_threads() -> int:
    """OS threads that run blocks: CKI_SIM_THREADS, or one for each CPU that this process may use."""
    return config.integer("CKI_SIM_THREADS") or len(os.sched_getaffinity(0))


def _triple(name: str, value: Sequence[int] | int, problems: list[str]) -> tuple[int, int, int]:
    parts = (value,) if isinstance(value, int) else tuple(value)
    if not 1 <= len(parts) <= 3 or any(not isinstance(p, int) or p < 1 for p in parts):
        problems.append(f"{name}={value!r} is not one to three positive integers")
        return (1, 1, 1)
    x, y, z = (*parts, 1, 1)[:3]
    return x, y, z


def _geometry(
    build: LoadedKernel,
    grid: Sequence[int] | int,
    block: Sequence[int] | int,
    smem: int,
    cluster: Sequence[int] | int,
    cooperative: bool,
    checks: Checks,
) -> runtime.Config:
    problems: list[str] = []
    g, b, c = (_triple(n, v, problems) for n, v in (("grid", grid), ("block", block), ("cluster", cluster)))
    threads, cluster_size, blocks = b[0] * b[1] * b[2], c[0] * c[1] * c[2], g[0] * g[1] * g[2]
    if threads > 1024:
        problems.append(f"block={block!r} has {threads} threads; at most 1024 are possible")
    if smem < 0 or smem + build.static_bytes > DYNAMIC_AREA:
        problems.append(
            f"smem={smem}: dynamic and static shared memory ({build.static_bytes} bytes) must fit {DYNAMIC_AREA} bytes"
        )
    if cluster_size > MAX_CLUSTER:
        problems.append(f"cluster={cluster!r} has {cluster_size} blocks; at most {MAX_CLUSTER} are possible")
    if any(x % y for x, y in zip(g, c)):
        problems.append(f"grid={grid!r} is not a multiple of cluster={cluster!r}")
    resident = threads * (blocks if cooperative else cluster_size)
    limit = MAX_RACE_THREADS if checks.races else MAX_CORESIDENT_THREADS
    if resident > limit and (cooperative or cluster_size > 1):
        problems.append(
            f"{resident} threads would be resident together; the simulated device holds {limit}"
            + (" when races are checked" if checks.races else "")
        )
    if problems:
        raise InvalidArgumentError("launch on the simulated device refused", problems)
    return runtime.Config(g, b, c, smem, checks.bits, cooperative, os_threads(), checks.seed)


def launch(
    kernel: SimKernel,
    grid: Sequence[int] | int,
    block: Sequence[int] | int,
    argv: ctypes.Array[ctypes.c_void_p],
    *,
    smem: int = 0,
    cluster: Sequence[int] | int = (1, 1, 1),
    cooperative: bool = False,
    checks: Checks | None = None,
    extents: Sequence[tuple[int, int]] = (),
) -> None:
    """Run a grid to its end.

    grid, block, cluster: one to three sizes, x first.  smem: bytes of dynamic shared memory.
    argv: cuLaunchKernel's argument array: one pointer for each kernel parameter, to the parameter's value.
    cooperative: all blocks are resident together and may wait for each other.
    checks: what to look for; None takes the checks of the surrounding `with cki.sim.checks(...)`.
    extents: (address, bytes) of each tensor that the kernel may touch, for `Checks.bounds`; without any, the check
        covers shared memory and arrays of known size alone.

    Raises InvalidArgumentError for an impossible geometry (nothing has run), SimulationError with the report when a
    check found something or the kernel could not go on (a deadlock, a trap): outputs are then undefined.
    """
    if checks is None:
        checks = current()
    build = kernel.build(checks.needs_instrumented_kernel)
    settings = _geometry(build, grid, block, smem, cluster, cooperative, checks)
    if extents and checks.bounds:
        settings.extents = (runtime.Extent * len(extents))(*(runtime.Extent(*extent) for extent in extents))
        settings.extent_count = len(extents)
    library = runtime.library()
    text = ctypes.c_void_p()
    findings = library.cki_sim_launch(build.module, settings, argv, ctypes.byref(text))
    words = ctypes.string_at(text.value or 0).decode() if findings else ""
    library.cki_sim_free(text)
    if findings:
        raise SimulationError(
            f"kernel {kernel.entry}: the simulated device found faults\n{dwarf.resolve(words)}"
        )
