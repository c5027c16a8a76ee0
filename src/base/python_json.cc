#include "base/python_json.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

namespace nfp {
namespace {

struct NonFinite {
  std::string_view token, mark;
  double number;
};
constexpr NonFinite kNonFinite[] = {
    {"NaN", "\x7f", std::numeric_limits<double>::quiet_NaN()},
    {"Infinity", "\x7f\x7f\x7f\x7f\x7f\x7f", std::numeric_limits<double>::infinity()},
    {"-Infinity", "-\x7f\x7f\x7f\x7f\x7f\x7f", -std::numeric_limits<double>::infinity()},
};

}  // namespace

std::string quote_non_finite(std::string_view json) {
  std::string out(json);
  for (size_t i = 0; i < out.size(); ++i) {
    if (out[i] == '"') {
      for (++i; i < out.size() && out[i] != '"'; ++i) i += out[i] == '\\' ? 1 : 0;
      continue;
    }
    for (const NonFinite& row : kNonFinite) {
      if (json.substr(i, row.token.size()) != row.token) continue;
      out[i] = '"';
      out.replace(i + 1, row.mark.size(), row.mark);
      i += row.token.size() - 1;
      out[i] = '"';
      break;
    }
  }
  return out;
}

std::string unquote_non_finite(std::string_view json) {
  std::string out;
  for (size_t i = 0; i < json.size(); ++i) {
    if (json[i] != '"') {
      out += json[i];
      continue;
    }
    const size_t begin = i;
    for (++i; i < json.size() && json[i] != '"'; ++i) i += json[i] == '\\' ? 1 : 0;
    const std::string_view string = json.substr(begin, i + 1 - begin);
    const auto row = std::find_if(std::begin(kNonFinite), std::end(kNonFinite), [&](const NonFinite& candidate) {
      return string.size() == candidate.token.size() && string.substr(1, candidate.mark.size()) == candidate.mark;
    });
    out += row == std::end(kNonFinite) ? string : row->token;
  }
  return out;
}

std::string_view non_finite_mark(double number) { return kNonFinite[std::isnan(number) ? 0 : number > 0 ? 1 : 2].mark; }

std::optional<double> non_finite_number(std::string_view mark) {
  for (const NonFinite& row : kNonFinite) {
    if (row.mark == mark) return row.number;
  }
  return std::nullopt;
}

}  // namespace nfp
