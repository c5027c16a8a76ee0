// What led to a kept response, as the Responses API lists it: GET /v1/responses/ID/input_items.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "server/api/api_error.h"
#include "server/api/json_text.h"

namespace nfp::server {

// The query's part: which of the items.
struct ItemsPage {
  int limit = 20;
  bool newest_first = true;
  std::string after;  // the id of the item before the first one; empty = from the start
};
MaybeError read_items_page(std::string_view query, ItemsPage* out);

// `conversation`: messages as ResponseStore keeps them, the last of which is the response's own. Nothing where none of
// the items has the id `page.after`.
std::optional<std::string> input_items(const Json& conversation, std::string_view response_id, const ItemsPage& page);

}  // namespace nfp::server
