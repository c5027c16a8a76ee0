#include <algorithm>

#include "engine/allowed_tokens.h"
#include "server/grammar/grammar.h"

namespace nfp::server {
namespace {

class MinTokens final : public TokenConstraint {
 public:
  MinTokens(std::unique_ptr<TokenConstraint> inner, int32_t min_tokens, std::vector<int32_t> end_ids)
      : inner_(std::move(inner)), left_(min_tokens), end_ids_(std::move(end_ids)) {}

  bool ready(std::chrono::microseconds wait) override { return inner_->ready(wait); }
  std::string_view failure() const override { return inner_->failure(); }
  ErrorCode failure_code() const override { return inner_->failure_code(); }

  bool fill(std::span<uint32_t> mask) override {
    const bool restricted = inner_->fill(mask);
    if (left_ <= 0 || !inner_->failure().empty()) return restricted;
    if (!restricted) std::fill(mask.begin(), mask.end(), ~0u);
    std::vector<uint32_t> without(mask.begin(), mask.end());
    for (const int32_t id : end_ids_) forbid_token(without, id);
    if (std::all_of(without.begin(), without.end(), [](uint32_t word) { return word == 0; })) return restricted;
    std::copy(without.begin(), without.end(), mask.begin());
    return true;
  }

  bool accept(int32_t token) override {
    --left_;
    return inner_->accept(token);
  }

 private:
  std::unique_ptr<TokenConstraint> inner_;
  int32_t left_;
  std::vector<int32_t> end_ids_;
};

}  // namespace

std::unique_ptr<TokenConstraint> with_min_tokens(std::unique_ptr<TokenConstraint> inner, int32_t min_tokens,
                                                 std::vector<int32_t> end_ids) {
  return std::make_unique<MinTokens>(std::move(inner), min_tokens, std::move(end_ids));
}

}  // namespace nfp::server
