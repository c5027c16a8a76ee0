// What the facts of a machine mean for whoever runs models on it: what is there, what is missing and what that costs.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "doctor/system_facts.h"

namespace nfp {

enum class Health : uint8_t {
  kGood,
  kSlower,   // works, at less than the machine could do, or than another would
  kMissing,  // something does not work
};

struct Finding {
  std::string_view id;  // for programs: "cpu_kernels"
  std::string_view title;
  Health health = Health::kGood;
  std::string found;
  std::string cost;    // of what is missing; empty where nothing is
  std::string remedy;  // empty where there is none
};

std::vector<Finding> diagnose(const SystemFacts& facts);

std::string_view name_of(Health health);  // "good", "slower", "missing"

}  // namespace nfp
