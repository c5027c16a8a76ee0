// How many tokens to draft in speculative decoding: pure, learns from the steps that it is told of.
//
// A step that drafts d tokens a sequence runs d FP8 steps and one FP16 step that verifies all of them. Where a draft is
// right with probability a, independently, it yields (1 - a^(d+1)) / (1 - a) tokens a sequence (Leviathan, Kalman and
// Matias, ICML 2023, section 3.1), and takes r(d) plain steps' time. The d with the largest quotient is chosen, if that
// is worth more than a plain step. Drafting with the model's own weights in fewer bits is Draft & Verify's and
// QuantSpec's idea (Zhang et al., ACL 2024; Tiwari et al., ICML 2025).
//
// a is one number for all; r is learnt for each d and size of the batch. What cannot be known without trying is tried
// now and then: a plain step among those that draft, a short draft among plain steps.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace nfp {

class DraftLength {
 public:
  // `always`: as many as may be, whether they gain or not.
  explicit DraftLength(int32_t most, bool always = false) : most_(most), always_(always) {}

  bool on() const { return most_ > 0; }
  // Drafts for each of the `drafting` ones of `sequences`, at most `most`; 0 = a plain step.
  int32_t choose(int32_t sequences, int32_t drafting, int32_t most) const;
  // Told of a plain FP16 step of one token a sequence,
  void plain(int32_t sequences, double seconds);
  // and of one that drafted: `accepted` of `tried` drafts were right. The drafts behind a wrong one are not tried.
  void drafted(int32_t sequences, int32_t drafts, int32_t tried, int32_t accepted, double seconds);

  double acceptance() const { return acceptance_; }

 private:
  static constexpr int32_t kTryAfter = 64;
  // Of two in a row the smaller counts: a step may have been held up.
  struct Mean {
    double value = 0;  // 0 = not known
    double last = 0;
    void add(double newest);
  };
  // Steps of up to 1, 2, 4, ... sequences.
  struct Batch {
    Mean plain_s;
    int32_t plains = 0;             // in all, counted up to kLearnt
    int32_t since_plain = 0;        // steps that drafted since
    int32_t since_drafted = 0;      // plain steps since,
    int32_t try_after = kTryAfter;  // of which so many bring the next try; more after tries that gained nothing
    std::vector<Mean> ratio;        // [drafts] times a plain step's
    std::vector<int32_t> tries;     // [drafts]
  };
  static size_t index_of(int32_t sequences);
  double ratio_of(const Batch& batch, int32_t drafts) const;
  // The best length that is worth more than a plain step; 0 = none is.
  int32_t best_of(const Batch& batch, int32_t sequences, int32_t drafting, int32_t most) const;

  int32_t most_;
  bool always_;
  double acceptance_ = 0.9;
  int32_t tried_ = 0;  // drafts, counted up to where the newest weighs no less any more
  std::array<Batch, 12> batches_;
};

}  // namespace nfp
