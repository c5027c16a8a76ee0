#include <cstddef>
#include <cstdint>
#include <string_view>

#include "backend/cuda/gemm/plan/tuning_table.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto table = nfp::cuda::TuningTable::parse(std::string_view(reinterpret_cast<const char*>(data), size), "fuzz");
  if (table.ok()) (void)table->dump();
  return 0;
}
