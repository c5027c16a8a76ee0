#include "server/api/response_items.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <utility>

#include "server/api/dialects.h"

namespace nfp::server {
namespace {

using dialect::text_field;

// Ids are of the item's place, so that they are the same each time.
class ItemList {
 public:
  explicit ItemList(std::string_view response_id) : tail_(response_id.substr(response_id.find('_') + 1)) {}

  void add_message(const Json& message) {
    const std::string role = text_field(message, "role");
    const std::string content = text_field(message, "content");
    if (role == "tool") {
      add("fco",
          {{"type", "function_call_output"}, {"call_id", text_field(message, "tool_call_id")}, {"output", content}});
      return;
    }
    if (const std::string thoughts = text_field(message, "reasoning_content"); !thoughts.empty()) {
      add("rs", {{"type", "reasoning"},
                 {"summary", Json::array()},
                 {"content", Json::array({{{"type", "reasoning_text"}, {"text", thoughts}}})}});
    }
    const auto calls = message.find("tool_calls");
    if (!content.empty() || calls == message.end()) {
      Json part = {{"type", role == "assistant" ? "output_text" : "input_text"}, {"text", content}};
      if (role == "assistant") part["annotations"] = Json::array();
      add("msg", {{"type", "message"}, {"role", role}, {"content", Json::array({std::move(part)})}});
    }
    if (calls == message.end()) return;
    for (const Json& call : *calls) {
      const Json& function = call["function"];
      add("fc", {{"type", "function_call"},
                 {"call_id", text_field(call, "id")},
                 {"name", text_field(function, "name")},
                 {"arguments", text_field(function, "arguments")}});
    }
  }
  Json take() { return std::move(items_); }

 private:
  void add(std::string_view prefix, Json item) {
    item["id"] = fmt::format("{}_{}i{:02x}", prefix, tail_, items_.size());
    item["status"] = "completed";
    items_.push_back(std::move(item));
  }

  std::string_view tail_;
  Json items_ = Json::array();
};

}  // namespace

MaybeError read_items_page(std::string_view query, ItemsPage* out) {
  while (!query.empty()) {
    const std::string_view one = query.substr(0, query.find('&'));
    query.remove_prefix(std::min(query.size(), one.size() + 1));
    const std::string_view name = one.substr(0, one.find('='));
    const std::string_view value = one.substr(std::min(one.size(), name.size() + 1));
    if (name == "limit") {
      const auto [end, failure] = std::from_chars(value.data(), value.data() + value.size(), out->limit);
      if (failure != std::errc() || end != value.data() + value.size() || out->limit < 1 || out->limit > 100) {
        return bad_request("limit", "'limit' must be an integer from 1 to 100");
      }
    } else if (name == "order") {
      if (value != "asc" && value != "desc") return bad_request("order", "'order' must be asc or desc");
      out->newest_first = value == "desc";
    } else if (name == "after") {
      out->after = value;
    }
  }
  return std::nullopt;
}

std::optional<std::string> input_items(const Json& conversation, std::string_view response_id, const ItemsPage& page) {
  ItemList list(response_id);
  for (size_t i = 0; i + 1 < conversation.size(); ++i) list.add_message(conversation[i]);
  Json all = list.take();
  if (page.newest_first) std::reverse(all.begin(), all.end());
  auto first = all.begin();
  if (!page.after.empty()) {
    first = std::find_if(all.begin(), all.end(), [&](const Json& item) { return item["id"] == page.after; });
    if (first == all.end()) return std::nullopt;
    ++first;
  }
  const auto last = first + std::min<std::ptrdiff_t>(page.limit, all.end() - first);
  Json data = Json::array();
  for (auto item = first; item != last; ++item) data.push_back(*item);
  const Json none = nullptr;
  return dump({{"object", "list"},
               {"first_id", data.empty() ? none : data.front()["id"]},
               {"last_id", data.empty() ? none : data.back()["id"]},
               {"has_more", last != all.end()},
               {"data", data}});
}

}  // namespace nfp::server
