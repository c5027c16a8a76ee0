// Any text of a model, cut anywhere: the calls and the text found do not depend on the cuts. What follows a byte 0xff,
// where there is one, is the schema of a tool's parameters.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "server/tools/reasoning_parser.h"
#include "server/tools/tool_call_parser.h"

namespace {

using nfp::server::ToolEvent;

std::string flat(nfp::server::ToolCallParser& parser, std::string_view text, size_t step) {
  std::vector<ToolEvent> events;
  for (size_t at = 0; at < text.size(); at += step) parser.feed(text.substr(at, step), &events);
  parser.finish(&events);
  std::string shown, thoughts;
  std::vector<std::string> calls;
  for (const ToolEvent& event : events) {
    if (event.kind == ToolEvent::Kind::kText) {
      shown += event.text;
    } else if (event.kind == ToolEvent::Kind::kReasoning) {
      thoughts += event.text;
    } else if (event.kind == ToolEvent::Kind::kCall) {
      calls.push_back(event.text + "(");
    } else {
      calls.at(static_cast<size_t>(event.call)) += event.text;
    }
  }
  for (const std::string& call : calls) shown += "\x01" + call;
  return shown + "\x02" + thoughts;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using nfp::server::ReasoningFormat;
  using nfp::server::ToolFormat;
  if (size < 1) return 0;
  const std::string_view all(reinterpret_cast<const char*>(data) + 1, size - 1);
  const std::string_view text = all.substr(0, all.find('\xff'));
  nfp::server::Json tools = nfp::server::Json::parse(
      R"([{"function":{"name":"f","parameters":{"properties":{"a":{"type":"integer"},"b":{"type":"object"}}}}}])");
  if (text.size() < all.size()) {
    auto schema = nfp::server::parse_json(all.substr(text.size() + 1));
    if (schema.ok()) tools[0]["function"]["parameters"] = std::move(*schema);
  }
  for (const ToolFormat format :
       {ToolFormat::kHermes, ToolFormat::kLlama3Json, ToolFormat::kMistral, ToolFormat::kQwen3Coder,
        ToolFormat::kPythonic, ToolFormat::kPhi4, ToolFormat::kGemma, ToolFormat::kHarmony}) {
    const auto make = [&] {
      auto calls = nfp::server::make_tool_call_parser(format, &tools);
      const bool thinks = data[0] >= 128;
      constexpr ReasoningFormat kThoughts[] = {ReasoningFormat::kThink, ReasoningFormat::kMistral,
                                               ReasoningFormat::kSeed};
      return thinks ? nfp::server::make_reasoning_parser(kThoughts[data[0] / 9 % 3], data[0] >= 192, std::move(calls))
                    : std::move(calls);
    };
    const auto whole = make();
    const auto cut = make();
    if (flat(*whole, text, text.size() + 1) != flat(*cut, text, data[0] % 9 + 1)) __builtin_trap();
  }
  return 0;
}
