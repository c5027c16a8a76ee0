// The most that a device can do, to say how near a measured operation is.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "nested/precision.h"

namespace nfp {

struct DeviceLimits {
  std::string source;                 // where the numbers are from
  double read_bytes_per_s = 0;        // of the memory that weights and cache are in
  double fp16_flop_per_s = 0;         // dense, of linear layers in FP16, and of all that is none
  double fp8_weights_flop_per_s = 0;  // likewise in kFp8, whose activations have 16 bits or more
  double fp8_flop_per_s = 0;          // likewise in kFp8W8A8
  double flop_per_s(Precision precision) const {
    if (is_exact(precision)) return fp16_flop_per_s;
    return precision == Precision::kFp8 ? fp8_weights_flop_per_s : fp8_flop_per_s;
  }
  // The least time in which so much can be read and computed, seconds.
  double least_seconds(double bytes, double flops, Precision precision) const;
};

// Of the GPUs whose data sheets are known here; `device` is BackendInfo::device.
std::optional<DeviceLimits> data_sheet_limits(std::string_view device);

}  // namespace nfp
