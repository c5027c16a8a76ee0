// What a hub answers, and names as people write them.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "hub/file_choice.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (const auto name = nfp::parse_hub_name(text); name && nfp::parse_hub_name(name->text())->text() != name->text()) {
    std::abort();
  }
  const auto model = nfp::parse_hub_model(text, "fuzz");
  if (!model.ok()) return 0;
  for (const nfp::HubFile& file : model->files) {
    if (file.path.find("..") == 0 || file.path.front() == '/') std::abort();
  }
  (void)nfp::descriptive_files(*model, "");
  (void)nfp::weight_files(*model, {"org/name", "main", ""},
                          [&](const std::string&) { return nfp::Result<std::string>(std::string(text)); });
  return 0;
}
