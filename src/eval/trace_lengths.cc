#include <charconv>
#include <optional>

#include "base/csv.h"
#include "eval/throughput.h"

namespace nfp {
namespace {

std::optional<int32_t> count_in(const std::vector<std::string_view>& fields, size_t column) {
  if (column >= fields.size()) return std::nullopt;
  int32_t value = 0;
  const char* last = fields[column].data() + fields[column].size();
  const auto [end, code] = std::from_chars(fields[column].data(), last, value);
  if (code != std::errc() || end != last || value < 0) return std::nullopt;
  return value;
}

}  // namespace

Result<std::vector<BenchRequest>> parse_trace(std::string_view text, std::string_view where, int32_t count,
                                              int32_t ctx) {
  std::vector<BenchRequest> requests;
  std::optional<size_t> input, output;
  for (int line_number = 1; !text.empty() && std::ssize(requests) < count; ++line_number) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty()) continue;
    const std::vector<std::string_view> fields = split_csv(line);
    if (!input) {
      for (size_t i = 0; i < fields.size(); ++i) {
        if (fields[i] == "ContextTokens") input = i;
        if (fields[i] == "GeneratedTokens") output = i;
      }
      if (!input || !output) {
        return error(ErrorCode::kInvalidInput,
                     "{}: the first line must name the columns ContextTokens and GeneratedTokens", where);
      }
      continue;
    }
    const auto in = count_in(fields, *input), out = count_in(fields, *output);
    if (!in || !out) {
      return error(ErrorCode::kInvalidInput, "{}: line {}: ContextTokens and GeneratedTokens must be whole numbers",
                   where, line_number);
    }
    if (*in < 1 || *out < 1 || int64_t{*in} + *out > ctx) continue;
    requests.push_back({*in, *out});
  }
  if (std::ssize(requests) < count) {
    return error(ErrorCode::kInvalidInput, "{}: {} requests fit a context of {} tokens, and {} were asked for", where,
                 requests.size(), ctx, count);
  }
  return requests;
}

}  // namespace nfp
