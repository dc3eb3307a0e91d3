// SPDX-License-Identifier: Apache-2.0
// Loops that keep sums in registers, compiled for each width that registers may have.
//
// [Note: width of registers] A vector wider than a register is cut by the compiler, and then goes
// by memory with every step: sums of rows took up to five times as long. So the width is a
// parameter of such loops, and the widest that the machine has is chosen when the library is
// loaded.

#pragma once

#include <type_traits>

#include "runtime/types.h"

namespace graphshard {

// What every machine has that the code is compiled for.
#if defined(__AVX512F__)
inline constexpr int kLeastRegisterBytes = 64;
#elif defined(__AVX2__)
inline constexpr int kLeastRegisterBytes = 32;
#else
inline constexpr int kLeastRegisterBytes = 16;
#endif

template <int kBytes>
using RegisterBytes = std::integral_constant<int, kBytes>;

#if defined(GRAPHSHARD_HAS_CLONES)
inline int find_register_bytes() {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("x86-64-v4")) return 64;
  if (__builtin_cpu_supports("x86-64-v3")) return 32;
  return kLeastRegisterBytes;
}
inline const int kRegisterBytes = find_register_bytes();

template <typename Function>
__attribute__((target("arch=x86-64-v4"))) void in_registers_of_64(const Function& function) {
  function(RegisterBytes<64>{});
}
template <typename Function>
__attribute__((target("arch=x86-64-v3"))) void in_registers_of_32(const Function& function) {
  function(RegisterBytes<32>{});
}
#endif

// Calls function(bytes), the width of the machine's registers as a constant. The function must be a
// lambda that is always inlined, and so must all that it calls.
template <typename Function>
GRAPHSHARD_INLINE void in_registers(const Function& function) {
#if defined(GRAPHSHARD_HAS_CLONES)
  if (kRegisterBytes == 64) return in_registers_of_64(function);
  if (kRegisterBytes == 32) return in_registers_of_32(function);
#endif
  function(RegisterBytes<kLeastRegisterBytes>{});
}

}  // namespace graphshard
