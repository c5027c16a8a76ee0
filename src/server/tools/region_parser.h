// Finds calls that stand between marks (or fill the answer), for forms that cannot be passed on while they come: what
// is between is held back until it is complete, and then read by one of written_calls.h.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "server/tools/tool_call_parser.h"
#include "server/tools/written_calls.h"

namespace nfp::server {

struct CallRegion {
  std::string open;
  std::string close;  // empty = to the end of the answer, or of the list
  std::function<WrittenCalls(std::string_view)> read;
  bool from_start = false;   // only where nothing but white space precedes it
  bool keeps_open = false;   // the mark is a part of what is read
  bool may_be_text = false;  // so what is cut off before its end is shown
  bool list = false;         // the mark ends in a JSON list's bracket, and the region where that closes
};

std::unique_ptr<ToolCallParser> make_region_parser(std::vector<CallRegion> regions);

}  // namespace nfp::server
