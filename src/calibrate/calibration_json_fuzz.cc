// The JSON of a calibration: the order of sensitivity (also inside a nested checkpoint's config.json) and the exponents
// of smoothing.
#include <cstddef>
#include <cstdint>
#include <string>

#include "calibrate/sensitivity.h"
#include "calibrate/smoothing.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  if (const auto order = nfp::sensitivity_from_json(text, "order.json"); order.ok()) {
    const auto again = nfp::sensitivity_from_json(nfp::sensitivity_to_json(*order), "again");
    if (!again.ok() || again->size() != order->size()) __builtin_trap();
    for (const nfp::Sensitivity& entry : *order) {
      if (entry.weights < 0) __builtin_trap();
    }
  }
  (void)nfp::scalings_from_json(text, "smoothing.json");
  return 0;
}
