#include <algorithm>
#include <utility>

#include "server/grammar/grammar.h"

namespace nfp::server {
namespace {

// The tokens that a mark may be written with, by how many of its bytes are there already.
struct MarkTokens {
  struct Piece {
    int32_t id;
    size_t bytes;
  };
  std::vector<std::vector<Piece>> after;

  bool empty() const { return after.empty() || after.front().empty(); }
};

MarkTokens tokens_of(std::string_view mark, const Tokenizer& tokenizer) {
  MarkTokens tokens;
  tokens.after.resize(mark.size());
  if (const auto whole = mark.empty() ? std::nullopt : tokenizer.token_to_id(mark)) {
    tokens.after.front().push_back({*whole, mark.size()});
    return tokens;
  }
  if (!mark.starts_with('<')) return {};  // with which no JSON begins
  for (size_t at = 0; at < mark.size(); ++at) {
    for (size_t bytes = 1; bytes <= mark.size() - at; ++bytes) {
      if (const auto id = tokenizer.token_to_id(mark.substr(at, bytes))) tokens.after[at].push_back({*id, bytes});
    }
  }
  return tokens;
}

class OrCall final : public TokenConstraint {
 public:
  OrCall(std::unique_ptr<TokenConstraint> inner, MarkTokens mark) : inner_(std::move(inner)), mark_(std::move(mark)) {}

  bool ready(std::chrono::microseconds wait) override { return at_ > 0 || inner_->ready(wait); }
  std::string_view failure() const override { return at_ > 0 ? std::string_view() : inner_->failure(); }
  ErrorCode failure_code() const override { return inner_->failure_code(); }

  bool fill(std::span<uint32_t> mask) override {
    if (at_ == mark_.after.size()) return false;
    if (at_ > 0) {
      std::fill(mask.begin(), mask.end(), 0u);
    } else if (!inner_->fill(mask)) {
      return false;
    }
    if (answers_) return true;
    for (const MarkTokens::Piece& piece : mark_.after[at_]) {
      const auto bit = static_cast<uint32_t>(piece.id);
      if (bit / 32 < mask.size()) mask[bit / 32] |= 1u << (bit % 32);
    }
    return true;
  }

  bool accept(int32_t token) override {
    if (at_ == mark_.after.size()) return true;
    if (!answers_) {
      for (const MarkTokens::Piece& piece : mark_.after[at_]) {
        if (piece.id != token) continue;
        at_ += piece.bytes;
        return true;
      }
      if (at_ > 0) return false;
      answers_ = true;
    }
    return inner_->accept(token);
  }

 private:
  std::unique_ptr<TokenConstraint> inner_;
  MarkTokens mark_;
  size_t at_ = 0;         // bytes of the mark that were written
  bool answers_ = false;  // what `inner` says
};

}  // namespace

std::unique_ptr<TokenConstraint> or_call(std::unique_ptr<TokenConstraint> inner, std::string_view mark,
                                         const Tokenizer& tokenizer) {
  MarkTokens tokens = tokens_of(mark, tokenizer);
  if (tokens.empty()) return inner;
  return std::make_unique<OrCall>(std::move(inner), std::move(tokens));
}

}  // namespace nfp::server
