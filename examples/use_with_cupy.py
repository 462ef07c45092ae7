"""CKI on CuPy arrays: zero-copy, on CuPy's current stream, outputs from CuPy's allocator.  Needs a GPU."""

from __future__ import annotations

import sys

try:
    import cupy
except ImportError:
    sys.exit("this example needs CuPy: pip install '.[cuda13]'; use_with_numpy.py runs without")

import cki


def main() -> None:
    if not cupy.cuda.is_available():
        sys.exit("this example needs a CUDA GPU; use_with_numpy.py runs without")
    x = cupy.random.standard_normal((16, 512, 1024), dtype=cupy.float32).astype(cupy.float16)
    gamma, beta = cupy.ones(1024, cupy.float16), cupy.zeros(1024, cupy.float16)

    with cupy.cuda.Stream(non_blocking=True) as stream:
        normalised = cki.layer_norm(x, gamma, beta)
        reused = cupy.empty_like(normalised)
        cki.layer_norm(x, gamma, beta, out=reused)  # into memory of your own: nothing is allocated
        stream.synchronize()

    wide = x.astype(cupy.float32)
    expected = (wide - wide.mean(-1, keepdims=True)) / cupy.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    difference = float(abs(normalised - expected).max())
    print("layer_norm:", normalised.shape, normalised.dtype, "largest difference", difference)
    print("into out=: ", "equal" if bool((reused == normalised).all()) else "different")


if __name__ == "__main__":
    main()
