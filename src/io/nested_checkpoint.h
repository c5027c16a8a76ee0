// What a nested checkpoint's config.json says about it (docs/format.md, "On disk").
#pragma once

#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "base/result.h"
#include "io/convert.h"

namespace nfp {

inline constexpr int kNestedFormatVersion = 1;
inline constexpr std::string_view kScaleSuffix = ".weight_scale";

// The object "nestedfp" of config.json.
struct NestedInfo {
  std::string lower_directory = "nestedfp";
  DType source_dtype = DType::kF16;                  // of nested matrices, where `dtypes` names no other
  std::map<std::string, DType, std::less<>> dtypes;  // exceptions by tensor
  std::set<std::string, std::less<>> inexact;        // BF16 matrices that did not nest exactly
  UpperRule uppers = UpperRule::kNearest;
  std::string calibration;  // JSON object: how the uppers were chosen, and the order of sensitivity; empty = none

  DType dtype_of(std::string_view tensor) const {
    const auto place = dtypes.find(tensor);
    return place == dtypes.end() ? source_dtype : place->second;
  }
};

Result<NestedInfo> parse_nested_info(std::string_view config_json, const std::string& name);

// The source's config.json with "quantization_config" (compressed-tensors: FP8 weights a channel, dynamic activations a
// token) and "nestedfp". `dense`: modules (without ".weight") that stayed as they were.
Result<std::string> nested_config(std::string_view source_config, const NestedInfo& info,
                                  const std::vector<std::string>& dense);
// The other way round.
Result<std::string> plain_config(std::string_view nested_config);

}  // namespace nfp
