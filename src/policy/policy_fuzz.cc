// Policies as the command line and /precision give them: a text is refused by an error that shows it, or is a policy
// whose name is a text for the same policy, and which chooses what it says for any load.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "policy/policy.h"
#include "policy/slo_policy.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  (void)nfp::parse_slo_missed(text);
  (void)nfp::parse_slo_levels(text);
  for (const nfp::Precision fp8 : {nfp::Precision::kFp8, nfp::Precision::kFp8W8A8}) {
    const auto policy = nfp::parse_policy(text, fp8);
    if (!policy.ok()) {
      if (policy.error().message.find(text) == std::string::npos) __builtin_trap();
      continue;
    }
    const auto again = nfp::parse_policy((*policy)->name(), fp8);
    if (!again.ok() || (*again)->name() != (*policy)->name()) __builtin_trap();
    double before = 0;
    for (const int32_t tokens : {0, 1, 2, 100, 4096, INT32_MAX - 1, INT32_MAX}) {
      nfp::StepLoad load;
      load.step_tokens = tokens;
      load.step_index = static_cast<uint64_t>(tokens) << 32 | 1;
      const nfp::Precision chosen = (*policy)->choose(load);
      if (chosen != (*again)->choose(load)) __builtin_trap();
      if (!(*policy)->fixed() && chosen != nfp::Precision::kFp16 && chosen != fp8) __builtin_trap();
      const double share = (*policy)->fp8_share(load);
      if (!(share >= before && share <= 1)) __builtin_trap();
      if (!(*policy)->needs_sensitivity() && share != 1) __builtin_trap();
      before = share;
    }
  }
  return 0;
}
