"""CKI on PyCUDA's arrays, by `__cuda_array_interface__`, which numba's device arrays have too.  Needs a GPU.

Arrays are read where they are.  Results are CuPy arrays, or memory of PyCUDA's own by `out=`; kernels run on the stream
that is named, else on CuPy's current one.  PyCUDA works in the primary context, which CuPy and CKI use.
"""

from __future__ import annotations

import sys

import numpy as np

try:
    import pycuda.driver as cuda
    from pycuda import gpuarray
except ImportError:
    sys.exit("this example needs PyCUDA (pip install pycuda, with CUDA's nvcc) and a GPU")

import cki


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def main() -> None:
    try:
        cuda.init()
    except cuda.Error as error:
        sys.exit(f"this example needs a CUDA GPU: {error}")
    context = cuda.Device(0).retain_primary_context()
    context.push()
    try:
        host = np.random.default_rng(0).standard_normal((64, 1024)).astype(np.float32)
        x = gpuarray.to_gpu(host)
        made = cki.softmax(x)
        print(
            "softmax: ",
            type(made).__module__,
            "largest difference",
            float(abs(made.get() - softmax(host)).max()),
        )

        stream = cuda.Stream()
        staged, out = gpuarray.empty_like(x), gpuarray.empty_like(x)
        staged.set_async(2 * host, stream)
        cki.softmax(staged, out=out, stream=stream)  # behind the copy, into memory of PyCUDA's
        stream.synchronize()
        print("into out=: largest difference", float(abs(out.get() - softmax(2 * host)).max()))
    finally:
        context.pop()


if __name__ == "__main__":
    main()
