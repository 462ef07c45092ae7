// Sentence embedding: the mean over a sequence's kept tokens, then its L2 normalisation.
//
//   m[b, h] = sum over kept s of x[b, s, h] / max(number kept, 1)
//   out[b, h] = m[b, h] / max(sqrt(sum_h m[b, h]^2), 1e-12)   with kNormalize, else m[b, h]
// in fp32, rounded once to Element. A token is kept where mask[b, s] is nonzero, or with kMaskIsLengths where
// s < mask[b]. Hidden tokens are not read, so NaN in padding does not matter. A sequence with none kept gives zeros.
//
// kPacked: x is [length, width], sequences one behind the other, and mask holds their offsets [batch + 1]: sequence b has the
// tokens mask[b] up to mask[b + 1], cut off at the ends of x. kFirstOnly then keeps only the first of each.
//
// x: [batch, length, width]. mask: [batch, length] or lengths [batch] of Mask (bool or an integer). out: [batch, width].
// Any strides; kVectorSize is 1 where the last axis of x is not dense. Bytes: kept tokens * width * sizeof(Element), read once.
//
// Work: a block a sequence. Threads form kSlices slices of kThreads / kSlices threads; slice i takes tokens i, i + kSlices,
// ..., so that a long sequence has as many loads in flight as it has threads. Dynamic shared memory holds the pooled row
// (fp32) and one partial row a slice of the columns in hand: 4 * (width + kThreads * kVectorSize) bytes.
#include "common/reduce.cuh"
#include "common/types.cuh"
#include "common/vec.cuh"

using namespace cki;

extern __shared__ __align__(16) unsigned char shared_memory[];

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    mean_pool(const Element* x, const Mask* mask, Element* out, int length, int width, i64 x_stride0, i64 x_stride1,
              i64 x_step, i64 mask_stride0, i64 mask_stride1, i64 out_stride, i64 out_step) {
  constexpr int kSliceThreads = kThreads / kSlices;
  constexpr int kColumns = kSliceThreads * kVectorSize;  // columns in hand
  __shared__ __align__(16) float count_scratch[1][kThreads / 32];
  __shared__ __align__(16) float square_scratch[1][kThreads / 32];
  float* partial = reinterpret_cast<float*>(shared_memory);  // [kSlices][kColumns]
  float* pooled = partial + kSlices * kColumns;              // [width]

  const i64 sequence = blockIdx.x;
  const int slice = threadIdx.x / kSliceThreads;
  const int lane = threadIdx.x % kSliceThreads;
  const Mask* sequence_mask = mask + sequence * mask_stride0;
  if constexpr (kPacked) {
    const i64 start = sequence_mask[0] < 0 ? 0 : sequence_mask[0];
    const i64 end = sequence_mask[mask_stride0] > length ? length : sequence_mask[mask_stride0];
    x += start * x_stride1 - sequence * x_stride0;
    length = end > start ? static_cast<int>(end - start) : 0;
    if constexpr (kFirstOnly) length = length > 0 ? 1 : 0;
  }
  const auto kept = [&](int token) {
    if constexpr (kPacked) return true;
    if constexpr (kMaskIsLengths) return token < sequence_mask[0];
    return sequence_mask[token * mask_stride1] != 0;
  };

  float count = 0.0f;  // exact: below 2^24 a thread, and the sum only divides
  for (int token = threadIdx.x; token < length; token += kThreads) count += kept(token) ? 1.0f : 0.0f;
  count = fmaxf(block_sum(count, count_scratch), 1.0f);

  for (int first = 0; first < width; first += kColumns) {
    const int column = first + lane * kVectorSize;
    float sums[kVectorSize] = {};
    if (column < width) {
      for (int token = slice; token < length; token += kSlices) {
        if (!kept(token)) continue;
        float values[kVectorSize];
        load_floats(x + (sequence * x_stride0 + token * x_stride1 + column * x_step), values);
#pragma unroll
        for (int i = 0; i < kVectorSize; ++i) sums[i] += values[i];
      }
    }
#pragma unroll
    for (int i = 0; i < kVectorSize; ++i) partial[slice * kColumns + lane * kVectorSize + i] = sums[i];
    __syncthreads();
    for (int c = threadIdx.x; c < kColumns && first + c < width; c += kThreads) {
      float total = 0.0f;
      for (int s = 0; s < kSlices; ++s) total += partial[s * kColumns + c];
      pooled[first + c] = total / count;
    }
    __syncthreads();
  }

  float divisor = 1.0f;
  if constexpr (kNormalize) {
    float squares = 0.0f;
    for (int c = threadIdx.x; c < width; c += kThreads) squares = fmaf(pooled[c], pooled[c], squares);
    divisor = fmaxf(sqrtf(block_sum(squares, square_scratch)), 1e-12f);
  }
  for (int c = threadIdx.x; c < width; c += kThreads)
    out[sequence * out_stride + c * out_step] = from_float<Element>(pooled[c] / divisor);
}
