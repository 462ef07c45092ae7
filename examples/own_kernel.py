"""A numerical pipeline with one kernel of your own: heat spreading over a plate, and its total and extremes.

The kernel is CUDA C++ in this file, compiled by `cki.load` at its first launch.  Everything else is the array
library's: CuPy on a GPU, NumPy on the simulated device when there is none.  Ten steps are captured as a graph and
replayed, so that they cost one submission.

    python examples/own_kernel.py
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import cki
from cki.device import cuda_device

STEP = """
// One explicit step of the heat equation on an n x n grid with a cold border: each cell moves towards the mean of its
// four neighbours (Jacobi). One thread a cell.
extern "C" __global__ void heat_step(const float* __restrict__ from, float* __restrict__ to, float rate, int n) {
  const int column = blockIdx.x * kTile + threadIdx.x;
  const int row = blockIdx.y * kTile + threadIdx.y;
  if (row >= n || column >= n) return;
  const int i = row * n + column;
  const bool on_border = row == 0 || column == 0 || row == n - 1 || column == n - 1;
  const float mean = on_border ? 0.f : 0.25f * (from[i - n] + from[i + n] + from[i - 1] + from[i + 1]);
  to[i] = on_border ? 0.f : from[i] + rate * (mean - from[i]);
}
"""
TILE, RATE = 16, 0.8


def expected(plate: np.ndarray, steps: int) -> np.ndarray:
    """The same in NumPy, float64."""
    values = plate.astype(np.float64)
    for _ in range(steps):
        mean = 0.25 * (values[:-2, 1:-1] + values[2:, 1:-1] + values[1:-1, :-2] + values[1:-1, 2:])
        inner = values[1:-1, 1:-1]
        values = np.pad(inner + RATE * (mean - inner), 1)
    return values


def run(xp: Any, n: int, steps: int) -> None:
    plate = np.zeros((n, n), np.float32)
    plate[n // 3 : n // 2, n // 3 : n // 2] = 100.0
    a, b = xp.array(plate), xp.empty((n, n), np.float32)
    step = cki.load(STEP, constants={"kTile": TILE})
    grid, block = (-(-n // TILE), -(-n // TILE)), (TILE, TILE)

    def ten_steps(first: Any, second: Any) -> None:
        for _ in range(5):
            step(grid, block, first, second, RATE, n)
            step(grid, block, second, first, RATE, n)

    graph = cki.capture(ten_steps, a, b, warmup=0)
    start = time.perf_counter()
    for _ in range(steps // 10):
        graph.replay()
    total, hottest = float(a.sum()), float(a.max())  # CuPy's own reductions, in stream order
    seconds = time.perf_counter() - start
    got = a.get() if hasattr(a, "get") else a
    print(f"{n} x {n} cells, {steps} steps, {graph.num_kernels} launches a replay: {seconds * 1e3:.1f} ms")
    print(f"total heat {total:.1f}, hottest cell {hottest:.2f}")
    print(f"largest difference {np.max(np.abs(got - expected(plate, steps))):.2e}")


def main() -> None:
    try:
        import cupy

        has_gpu = cupy.cuda.is_available()
    except ImportError:
        has_gpu = False
    if has_gpu:
        print(f"on {cuda_device(0)}")
        run(cupy, 1024, 200)
    else:
        with cki.device("sim") as info:
            print(f"on the {info}")
            run(np, 96, 20)


if __name__ == "__main__":
    main()
