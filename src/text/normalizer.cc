#include "text/normalizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "text/utf8.h"

namespace nfp::text {
namespace {

// Below U+0300 every character is its own NFC form and no two of them combine: such text needs no work.
// U+0300 begins with the byte 0xCC. ASCII is unchanged by all four forms.
bool is_trivially_normal(std::string_view text, UnicodeForm form) {
  const unsigned char limit = form == UnicodeForm::kNfc ? 0xCC : 0x80;
  return std::all_of(text.begin(), text.end(), [&](char c) { return static_cast<unsigned char>(c) < limit; });
}

int combining_class(utf8proc_int32_t code_point) { return utf8proc_get_property(code_point)->combining_class; }

// Canonical ordering (Unicode 3.11, D109). utf8proc's own is quadratic in the length of a run of marks.
void order_marks(std::vector<utf8proc_int32_t>& text) {
  for (size_t i = 0; i < text.size();) {
    if (combining_class(text[i]) == 0) {
      ++i;
      continue;
    }
    size_t end = i + 1;
    while (end < text.size() && combining_class(text[end]) != 0) ++end;
    std::stable_sort(text.begin() + static_cast<std::ptrdiff_t>(i), text.begin() + static_cast<std::ptrdiff_t>(end),
                     [](auto a, auto b) { return combining_class(a) < combining_class(b); });
    i = end;
  }
}

// What a chain of replacements may make of a text: no real normalizer comes near it.
constexpr size_t kMaxGrowth = 32;
constexpr size_t kMaxGrowthStart = 4096;

Result<std::string> replace_all(std::string_view text, const Normalizer::Replace& step, size_t limit,
                                RegexSearch& search) {
  std::string out;
  size_t at = 0;
  const auto put = [&](size_t begin, size_t end) -> Status {
    out += text.substr(at, begin - at);
    out += step.to;
    at = end;
    if (out.size() <= limit) return ok_status();
    return error(ErrorCode::kResource, "the tokenizer's normalizer makes more than {} bytes of this text", limit);
  };
  if (step.pattern.empty()) {
    for (size_t hit; (hit = text.find(step.from, at)) != std::string_view::npos;) {
      NFP_RETURN_IF_ERROR(put(hit, hit + step.from.size()));
    }
  } else {
    // An empty match is replaced too ("^", "$"), but for one right after a match, as Oniguruma's find_iter has it.
    std::optional<size_t> last_end;
    for (size_t from = 0; !text.empty() && from <= text.size();) {
      NFP_ASSIGN_OR_RETURN(const RegexSearch::Match match, search.next(step.pattern[0], text, from));
      if (!match.found) break;
      const bool is_empty = match.begin == match.end;
      if (!is_empty || last_end != match.end) NFP_RETURN_IF_ERROR(put(match.begin, match.end));
      last_end = from = match.end;
      if (is_empty) {
        if (from == text.size()) break;
        from += utf8_length(text[from]);
      }
    }
  }
  out += text.substr(at);
  return out;
}

std::string_view strip(std::string_view text, const Normalizer::Strip& step) {
  if (step.left) text.remove_prefix(leading_white_space(text));
  if (step.right) text.remove_suffix(trailing_white_space(text));
  return text;
}

}  // namespace

std::string unicode_normalize(std::string_view text, UnicodeForm form) {
  if (is_trivially_normal(text, form)) return std::string(text);
  const bool compatible = form == UnicodeForm::kNfkc || form == UnicodeForm::kNfkd;
  const bool compose = form == UnicodeForm::kNfc || form == UnicodeForm::kNfkc;
  const auto decompose = static_cast<utf8proc_option_t>(UTF8PROC_DECOMPOSE | (compatible ? UTF8PROC_COMPAT : 0));

  std::vector<utf8proc_int32_t> code_points;
  code_points.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    utf8proc_int32_t parts[32];  // the longest decomposition (U+FDFA, NFKD) has 18
    const auto code_point = static_cast<utf8proc_int32_t>(next_code_point(text, i));
    const utf8proc_ssize_t count = utf8proc_decompose_char(code_point, parts, 32, decompose, nullptr);
    if (count > 0 && count <= 32) {
      code_points.insert(code_points.end(), parts, parts + count);
    } else {
      code_points.push_back(code_point);
    }
  }
  order_marks(code_points);
  if (compose) {
    const utf8proc_ssize_t count =
        utf8proc_normalize_utf32(code_points.data(), static_cast<utf8proc_ssize_t>(code_points.size()),
                                 static_cast<utf8proc_option_t>(UTF8PROC_COMPOSE | UTF8PROC_STABLE));
    if (count >= 0) code_points.resize(static_cast<size_t>(count));
  }
  std::string out;
  out.reserve(text.size());
  for (const utf8proc_int32_t code_point : code_points) append_utf8(out, static_cast<char32_t>(code_point));
  return out;
}

Result<std::string_view> Normalizer::apply(std::string_view text, std::string& storage, RegexSearch& search) const {
  const size_t limit = kMaxGrowthStart + kMaxGrowth * text.size();
  std::string_view now = text;
  for (const Step& step : steps_) {
    if (const auto* form = std::get_if<UnicodeForm>(&step)) {
      if (!is_trivially_normal(now, *form)) now = storage = unicode_normalize(now, *form);
    } else if (const auto* prepend = std::get_if<Prepend>(&step)) {
      if (!now.empty()) now = storage = prepend->text + std::string(now);
    } else if (const auto* replace = std::get_if<Replace>(&step)) {
      NFP_ASSIGN_OR_RETURN(std::string replaced, replace_all(now, *replace, limit, search));
      now = storage = std::move(replaced);
    } else {
      now = strip(now, std::get<Strip>(step));
    }
  }
  return now;
}

}  // namespace nfp::text
