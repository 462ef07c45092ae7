// A program that checks the fiber switch of the machine it is compiled for: callee-saved integer and floating-point registers
// survive, stacks are aligned for SIMD, each fiber keeps its own. Exits with 0 when all is well.
#include <cstdint>
#include <cstdio>

#include "fiber.h"

using namespace cki::sim;

namespace {

constexpr int kFibers = 100, kRounds = 50;
Fiber fibers[kFibers], main_fiber;
int current = 0;
double results[kFibers];
bool misaligned = false;

void next() {
  const int from = current;
  current = (current + 1) % kFibers;
  switch_fiber(fibers[from], fibers[current]);
}

void entry() {
  alignas(16) volatile char local[16];
  if (reinterpret_cast<std::uintptr_t>(local) % 16 != 0) misaligned = true;
  const int me = current;
  // Live across every switch: more values than there are callee-saved registers of either kind.
  double a = me, b = me + 0.5, c = me * 2.0, d = me - 1.0, e = me * 0.25, f = me + 3.0, g = me - 7.0, h = me * 8.0, i = me;
  long p = me, q = me + 1, r = me + 2, s = me + 3, t = me + 4, u = me + 5, v = me + 6, w = me + 7;
  for (int round = 0; round < kRounds; ++round) {
    next();
    a += 1, b += a, c += b, d += c, e += d, f += e, g += f, h += g, i += h;
    p += 1, q += p, r += q, s += r, t += s, u += t, v += u, w += v;
  }
  results[me] = i + static_cast<double>(w % 1000003);
  const int from = current;
  if (me == kFibers - 1) switch_fiber(fibers[from], main_fiber);
  current = me + 1;
  switch_fiber(fibers[from], fibers[current]);
}

double expected(int me) {
  double a = me, b = me + 0.5, c = me * 2.0, d = me - 1.0, e = me * 0.25, f = me + 3.0, g = me - 7.0, h = me * 8.0, i = me;
  long p = me, q = me + 1, r = me + 2, s = me + 3, t = me + 4, u = me + 5, v = me + 6, w = me + 7;
  for (int round = 0; round < kRounds; ++round) {
    a += 1, b += a, c += b, d += c, e += d, f += e, g += f, h += g, i += h;
    p += 1, q += p, r += q, s += r, t += s, u += t, v += u, w += v;
  }
  return i + static_cast<double>(w % 1000003);
}

}  // namespace

int main() {
  for (Fiber& fiber : fibers) prepare_fiber(fiber, allocate_stack(), kStackBytes, entry);
  switch_fiber(main_fiber, fibers[0]);
  int wrong = misaligned;
  for (int i = 0; i < kFibers; ++i) wrong += results[i] != expected(i);
  if (wrong) std::printf("%d wrong, misaligned: %d\n", wrong, misaligned);
  return wrong != 0;
}
