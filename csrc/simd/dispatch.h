// SPDX-License-Identifier: Apache-2.0
// One binary for machines of different instruction sets: hot loops are compiled once per width of
// vector registers, and each call takes the widest that the machine has, or limit_registers allows.
//
//   dispatch<64>([&](auto bytes) GRAPHSHARD_INLINE_LAMBDA { sum_rows<bytes>(...); });
//
// [Note: register width] A vector wider than a register is cut by the compiler, and then goes
// through memory with every step: sums of rows took up to five times as long. So the width is a
// template parameter of such loops.

#pragma once

#include <algorithm>
#include <atomic>
#include <type_traits>

#include "simd/macros.h"

namespace graphshard {

// What every machine has that the code is compiled for: NEON, SSE2, or what -march adds.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
inline constexpr int kLeastRegisterBytes = 64;
#elif defined(__AVX2__) && defined(__FMA__)
inline constexpr int kLeastRegisterBytes = 32;
#else
inline constexpr int kLeastRegisterBytes = 16;
#endif

// The widest registers for loops over values of type T. float64 is there for accuracy: it has one
// instance, which halves what its kernels take to compile.
template <typename T>
inline constexpr int kWidestRegister = std::is_same_v<T, double> ? kLeastRegisterBytes : 64;

template <int kBytes>
using RegisterBytes = std::integral_constant<int, kBytes>;

// Sanitizers look at one instance: they find the same in any, and take long to compile.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__SANITIZE_ADDRESS__)
#define GRAPHSHARD_HAS_DISPATCH

// Names of single features, because clang knows those of levels only since version 18.
inline int find_register_bytes() {
  __builtin_cpu_init();
  const bool has_v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  const bool has_v4 = has_v3 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return has_v4 ? 64 : has_v3 ? 32 : kLeastRegisterBytes;
}

template <typename Function>
__attribute__((noinline, target("arch=x86-64-v4"))) void run_with_64(const Function& function) {
  function(RegisterBytes<64>{});
}
template <typename Function>
__attribute__((noinline, target("arch=x86-64-v3"))) void run_with_32(const Function& function) {
  function(RegisterBytes<32>{});
}
#else
inline int find_register_bytes() { return kLeastRegisterBytes; }
#endif

// The width that calls choose their code by.
inline std::atomic<int> chosen_register_bytes = find_register_bytes();

inline int register_bytes() { return chosen_register_bytes.load(std::memory_order_relaxed); }

// Has later calls use registers of at most `most` bytes, as far as the machine has them; returns
// the width that was used until now. Not meant for while a kernel runs.
inline int limit_registers(int most) {
  const int bytes = std::max(kLeastRegisterBytes, std::min(most, find_register_bytes()));
  return chosen_register_bytes.exchange(bytes, std::memory_order_relaxed);
}

template <typename Function>
GRAPHSHARD_NOINLINE void run_with_least(const Function& function) {
  function(RegisterBytes<kLeastRegisterBytes>{});
}

// Calls function(bytes) with the width of registers to use, at most kMost, as a constant.
// The function must be a lambda that is always inlined, and so must all that it calls.
template <int kMost, typename Function>
GRAPHSHARD_INLINE void dispatch(const Function& function) {
#if defined(GRAPHSHARD_HAS_DISPATCH)
  if constexpr (kMost >= 64 && kLeastRegisterBytes < 64) {
    if (register_bytes() >= 64) return run_with_64(function);
  }
  if constexpr (kMost >= 32 && kLeastRegisterBytes < 32) {
    if (register_bytes() >= 32) return run_with_32(function);
  }
#endif
  run_with_least(function);
}

}  // namespace graphshard
