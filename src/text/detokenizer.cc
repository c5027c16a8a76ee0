#include "text/detokenizer.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "text/utf8.h"

namespace nfp {

using text::kReplacement;
using text::Utf8Unit;

StreamingDetokenizer::StreamingDetokenizer(std::shared_ptr<const Tokenizer> tokenizer, DetokenizerOptions options)
    : tokenizer_(std::move(tokenizer)), options_(options), at_start_(!options.continues) {}

std::string StreamingDetokenizer::append(int32_t id) {
  std::string out;
  if (!tokenizer_->id_to_token(id) || (options_.skip_special && tokenizer_->is_special(id))) return out;
  const bool is_fallback = tokenizer_->fallback_byte(id).has_value();
  if (pending_fallback_ != is_fallback) flush_rest(out);
  pending_fallback_ = is_fallback;

  const std::string_view bytes = tokenizer_->token_bytes(id);
  const size_t begin = pending_.size();
  pending_ += bytes;
  if (at_start_) {
    const Tokenizer::LeadingSpace rule = tokenizer_->leading_space();
    if (rule == Tokenizer::LeadingSpace::kDropOne && bytes.starts_with(' ')) pending_.erase(begin, 1);
    if (rule == Tokenizer::LeadingSpace::kDropFirstToken) pending_ = tokenizer_->first_token_bytes(id);
    at_start_ = rule == Tokenizer::LeadingSpace::kDropOne && bytes.empty();
  }
  flush_complete(out);
  return out;
}

std::string StreamingDetokenizer::finish(bool drop_unfinished) {
  std::string out;
  if (drop_unfinished) {
    flush_complete(out);
    pending_.clear();
  }
  flush_rest(out);
  pending_fallback_ = false;
  at_start_ = !options_.continues;
  return out;
}

// Moves everything but the beginning of an unfinished sequence from pending_ to `out`.
void StreamingDetokenizer::flush_complete(std::string& out) {
  std::string_view rest = pending_;
  while (!rest.empty()) {
    const Utf8Unit unit = text::utf8_unit(rest);
    if (unit.kind == Utf8Unit::kIncomplete) break;
    if (unit.kind == Utf8Unit::kComplete) {
      out += rest.substr(0, unit.size);
    } else {
      for (int i = 0; i < (pending_fallback_ ? unit.size : 1); ++i) out += kReplacement;
    }
    rest.remove_prefix(unit.size);
  }
  pending_.erase(0, pending_.size() - rest.size());
}

void StreamingDetokenizer::flush_rest(std::string& out) {
  flush_complete(out);
  if (pending_.empty()) return;
  for (size_t i = 0; i < (pending_fallback_ ? pending_.size() : 1); ++i) out += kReplacement;
  pending_.clear();
}

}  // namespace nfp
