// Compiles a hot arithmetic loop twice, for AVX2 and for the baseline of the architecture, and picks at load time.
//
// The bits do not depend on the choice: products of two operands of at most 12 significant bits are exact in fp32, so that a
// fused and a separate multiply and add round alike, and the order of additions is the source's.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define CKI_SIM_VECTORIZE __attribute__((target_clones("arch=x86-64-v3", "default"), optimize("O3", "fp-contract=fast")))
#else
#define CKI_SIM_VECTORIZE
#endif
