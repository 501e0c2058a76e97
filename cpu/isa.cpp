// Which instruction sets this processor has.
#include "cpu/isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>

#include "core/error.h"
#include "cpu/cpu.h"

namespace hearth::cpu {
namespace {

bool supports(Isa isa) {
  if (isa == Isa::scalar) return true;
#if defined(__x86_64__)
  // __builtin_cpu_supports also asks the operating system whether it saves the registers.
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  const bool avx2 = f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (isa == Isa::avx2) return avx2;
  return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

}  // namespace

const char* to_string(Isa isa) {
  switch (isa) {
    case Isa::scalar:
      return "scalar";
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512-vnni";
  }
  return "?";
}

std::vector<Isa> available_isas() {
  std::vector<Isa> isas;
  for (const Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512}) {
    if (supports(isa)) isas.push_back(isa);
  }
  return isas;
}

Isa best_isa() {
  return available_isas().back();
}

const Kernels& kernels(Isa isa) {
  const auto isas = available_isas();
  if (std::find(isas.begin(), isas.end(), isa) == isas.end()) {
    fail("this processor cannot run {} kernels; the best it has is {}", to_string(isa), to_string(best_isa()));
  }
#if defined(__x86_64__)
  if (isa == Isa::avx2) return kernels_avx2;
  if (isa == Isa::avx512) return kernels_avx512;
#endif
  return kernels_scalar;
}

}  // namespace hearth::cpu
