"""GB/s at which an H200 reads memory and does nothing else: the roof of attention over a cache.

A copy's rate (`common.copy_rate`) counts reads and writes, between which memory must turn; kernels that only read may
exceed it.  The best of a few shapes of one plain kernel: 16 bytes a load, several loads of a thread under way.
"""

from __future__ import annotations

import itertools
from typing import Any

import common

_SOURCE = r"""
extern "C" __global__ void __launch_bounds__(512) read_all(const uint4* x, unsigned* seen, long long vectors) {
  const long long stride = (long long)gridDim.x * blockDim.x;
  unsigned bits = 0;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < vectors; i += LOADS * stride) {
    uint4 loaded[LOADS];
#pragma unroll
    for (int k = 0; k < LOADS; ++k) loaded[k] = i + k * stride < vectors ? __ldcs(x + i + k * stride) : uint4{};
#pragma unroll
    for (int k = 0; k < LOADS; ++k) bits |= loaded[k].x | loaded[k].y | loaded[k].z | loaded[k].w;
  }
  if (bits) atomicOr(seen, bits);
}
"""


def read_rate(nbytes: int = 1 << 29) -> float:
    """Over buffers of `nbytes`, each byte read once.  All are 1, which the kernel must have seen."""
    import cupy

    inputs = [(cupy.full(nbytes // 4, 0x01010101, cupy.uint32), cupy.zeros(1, cupy.uint32)) for _ in range(2)]
    processors = cupy.cuda.Device().attributes["MultiProcessorCount"]
    fastest = float("inf")
    for loads, per_sm in itertools.product((4, 8), (2, 4)):
        kernel = cupy.RawKernel(_SOURCE, "read_all", options=(f"-DLOADS={loads}",))

        def read(x: Any, seen: Any, kernel: Any = kernel, blocks: int = processors * per_sm) -> None:
            kernel((blocks,), (512,), (x, seen, x.nbytes // 16))

        timing = common.graph_time(read, inputs, replays=10)
        if any(int(seen[0]) != 0x01010101 for _, seen in inputs):
            raise SystemExit("read_rate: the kernel has not read what it should")
        fastest = min(fastest, timing.median_us)
    return nbytes / fastest / 1e3
