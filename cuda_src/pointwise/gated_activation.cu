// Gated linear units (SwiGLU, GeGLU, ReGLU ...; Shazeer 2020, arXiv:2002.05202) on the output of one gate-and-up projection.
//
//   y[r, c] = activation(gate[r, c] + gate_bias[c]) * (up[r, c] + up_bias[c])
//
// x: rows of 2 * width elements that hold both halves; y: rows of `width` elements (row_address.cuh). bias: [2 * width] in
// the order of x. kLayout says where gate and up of column c lie in x: gate at c and up at width + c (gate first), the other
// way round (up first), or at 2c and 2c + 1 (interleaved).
// Arithmetic is fp32, rounded once. Bytes moved a row: 3 * width * sizeof(Element).
// kOverlaps (sm_90): the launch may begin while the one before it ends, of which it waits for all, and the next one beside it.
#include "common/row_address.cuh"
#include "common/vec.cuh"
#include "pointwise/activation.cuh"
#include "pointwise/tile.cuh"
#include "ptx/grid_dependency.cuh"

using namespace cki;

constexpr pointwise::Activation kKind = static_cast<pointwise::Activation>(kActivation);

enum class Layout { kGateFirst = 0, kUpFirst = 1, kInterleaved = 2 };  // cki/heuristics/pointwise.py

constexpr bool kInterleaved = static_cast<Layout>(kLayout) == Layout::kInterleaved;

// Gate and up of kVectorSize columns, in the type in which they are stored.
template <typename T>
struct GateUp {
  // Two halves, or with kInterleaved the elements in their order in memory.
  Vector<T, kVectorSize> halves[2];

  // row: the row's start.
  __device__ __forceinline__ void load(const T* row, i64 step, int column, int width) {
    const int first = kInterleaved ? 2 * column : column;
    const int second = first + (kInterleaved ? kVectorSize : width);
    halves[0].load(row + column_offset(first, step));
    halves[1].load(row + column_offset(second, step));
  }

  __device__ __forceinline__ void to_floats(float (&gate)[kVectorSize], float (&up)[kVectorSize]) const {
    float first[kVectorSize], second[kVectorSize];
    halves[0].to_floats(first);
    halves[1].to_floats(second);
#pragma unroll
    for (int i = 0; i < kVectorSize; ++i) {
      if constexpr (kInterleaved) {
        const auto element = [&](int index) { return index < kVectorSize ? first[index] : second[index - kVectorSize]; };
        gate[i] = element(2 * i);
        up[i] = element(2 * i + 1);
      } else {
        constexpr bool kUpFirst = static_cast<Layout>(kLayout) == Layout::kUpFirst;
        gate[i] = kUpFirst ? second[i] : first[i];
        up[i] = kUpFirst ? first[i] : second[i];
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    gated_activation(const Element* x, const Bias* bias, Element* y, int rows, int width, int extent1, int extent2,
                     i64 x_stride0, i64 x_stride1, i64 x_stride2, i64 x_step, i64 y_stride0, i64 y_stride1, i64 y_stride2,
                     i64 y_step, i64 bias_step) {
  if constexpr (kOverlaps) {
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
  }
  const int row = tile_row();
  if (kRowsPerBlock > 1 && row >= rows) return;
  const RowExtents extents{extent1, extent2};
  const Element* x_row = RowTensor<const Element>{x, x_stride0, x_stride1, x_stride2, x_step}.row(row, extents);
  Element* y_row = RowTensor<Element>{y, y_stride0, y_stride1, y_stride2, y_step}.row(row, extents);

  for_each_tile(width, [&](int first) {
    GateUp<Element> inputs[kVectorsPerThread];
#pragma unroll
    for (int v = 0; v < kVectorsPerThread; ++v)
      if (const int column = tile_column(first, v); in_row(column, width)) inputs[v].load(x_row, x_step, column, width);
#pragma unroll
    for (int v = 0; v < kVectorsPerThread; ++v) {
      const int column = tile_column(first, v);
      if (!in_row(column, width)) continue;
      float gate[kVectorSize], up[kVectorSize];
      inputs[v].to_floats(gate, up);
      if constexpr (kHasBias) {
        GateUp<Bias> biases;
        biases.load(bias, bias_step, column, width);
        float gate_bias[kVectorSize], up_bias[kVectorSize];
        biases.to_floats(gate_bias, up_bias);
#pragma unroll
        for (int i = 0; i < kVectorSize; ++i) {
          gate[i] += gate_bias[i];
          up[i] += up_bias[i];
        }
      }
#pragma unroll
      for (int i = 0; i < kVectorSize; ++i)
        gate[i] = pointwise::activate<kKind, sizeof(Element)>(gate[i]) * up[i];
      store_floats(y_row + column_offset(column, y_step), gate);
    }
  });
}
