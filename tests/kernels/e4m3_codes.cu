// Every pair of e4m3 codes as f16, by the instruction and by bits, one thread a pair.
#include "common/convert_element.cuh"
#include "common/types.cuh"

using namespace cki;

extern "C" __global__ void __launch_bounds__(256) e4m3_codes(u32* by_instruction, u32* by_bits) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  by_instruction[i] = e4m3x2_as_f16x2<89>(static_cast<u16>(i));
  by_bits[i] = e4m3x2_as_f16x2<80>(static_cast<u16>(i));
}
