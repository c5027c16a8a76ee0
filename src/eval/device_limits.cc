#include "eval/device_limits.h"

#include <algorithm>

namespace nfp {

double DeviceLimits::least_seconds(double bytes, double flops, Precision precision) const {
  const double rate = flop_per_s(precision);
  return std::max(read_bytes_per_s > 0 ? bytes / read_bytes_per_s : 0, rate > 0 ? flops / rate : 0);
}

std::optional<DeviceLimits> data_sheet_limits(std::string_view device) {
  // NVIDIA's data sheets of the H100 and H200 Tensor Core GPU, SXM: without sparsity, at boost clock. No kernel reaches
  // them: a card at its power limit clocks lower, and memory gives some 92 % at best.
  struct Entry {
    std::string_view name;
    double read_bytes_per_s;
  };
  constexpr Entry kEntries[] = {{"H200", 4.8e12}, {"H100 80GB HBM3", 3.35e12}};
  for (const Entry& entry : kEntries) {
    if (device.find(entry.name) == std::string_view::npos) continue;
    return DeviceLimits{"data sheet", entry.read_bytes_per_s, 989.5e12, 989.5e12, 1979e12};
  }
  return std::nullopt;
}

}  // namespace nfp
