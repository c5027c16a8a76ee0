// What one render of a chat template may use; see chat_template.h.
#pragma once

#include <cstdint>
#include <stop_token>

namespace nfp {

struct ChatTemplateLimits {
  uint64_t max_output_bytes = 16u << 20;   // the rendered prompt
  uint64_t max_memory_bytes = 512u << 20;  // all that one render makes, temporaries included
  uint64_t max_steps = 10'000'000;         // nodes evaluated, items visited, and one for every 64 bytes handled
  int max_depth = 1'000;                   // nested evaluations; a macro that calls itself uses about four per call
  std::stop_token stop = {};               // ends the render early
};

}  // namespace nfp
