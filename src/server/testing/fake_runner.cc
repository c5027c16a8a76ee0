#include "server/testing/fake_runner.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <new>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>

namespace nfp::server {
namespace {

constexpr int32_t kMark[] = {'S', 'A', 'Y', ':'};
constexpr int32_t kHow[] = {'H', 'O', 'W', '?'};

float fake_logprob(int32_t token) { return -0.1f - static_cast<float>(token % 7) * 0.25f; }

// Position of the answer in the prompt, or -1.
int32_t find_mark(const std::vector<int32_t>& prompt) {
  const auto place = std::find_end(prompt.begin(), prompt.end(), std::begin(kMark), std::end(kMark));
  return place == prompt.end() ? -1 : static_cast<int32_t>(place - prompt.begin()) + 4;
}

// nullopt: nothing is.
std::optional<int32_t> first_allowed(const Sequence& sequence, int32_t place, int32_t wanted) {
  if (!sequence.masked()) return wanted;
  std::vector<uint32_t> mask((kByteVocab + 31) / 32);
  if (!sequence.fill_mask(place, mask)) return wanted;
  const auto allowed = [&](int32_t token) {
    return (mask[static_cast<size_t>(token) / 32] >> (static_cast<uint32_t>(token) % 32) & 1u) != 0;
  };
  if (allowed(wanted)) return wanted;
  // The end first, then what is most likely to lead there.
  if (allowed(kByteEnd)) return kByteEnd;
  for (const char c : std::string_view("}]\",:0123456789{[")) {
    if (allowed(static_cast<uint8_t>(c))) return static_cast<uint8_t>(c);
  }
  for (int32_t token = 33; token < 256; ++token) {
    if (allowed(token)) return token;
  }
  for (int32_t token = 0; token < kByteVocab; ++token) {
    if (allowed(token)) return token;
  }
  return std::nullopt;
}

OutputToken scored(std::optional<int32_t> chosen, int32_t alternatives, Precision precision) {
  OutputToken out;
  const int32_t token = out.token = chosen.value_or(0);
  out.has_choice = chosen.has_value();
  out.precision = precision;
  out.logprob = fake_logprob(token);
  out.rank = 1;
  for (int32_t i = 0; i < alternatives; ++i) {
    const int32_t other = (token + i) % 256;
    out.top.push_back({other, i == 0 ? out.logprob : fake_logprob(token) - static_cast<float>(i)});
  }
  return out;
}

}  // namespace

int32_t FakeRunner::answer(const Sequence& sequence, int32_t position) {
  const auto& prompt = sequence.request.prompt;
  if (prompt.size() >= 4 && std::equal(std::begin(kHow), std::end(kHow), prompt.end() - 4)) {
    const SamplingParams& sampling = sequence.request.sampling;
    const std::string text = fmt::format("temperature {} top_k {}", sampling.temperature, sampling.top_k);
    return position < static_cast<int32_t>(text.size()) ? text[static_cast<size_t>(position)] : kByteEnd;
  }
  const int32_t from = find_mark(prompt);
  if (from < 0) return 'a' + position % 26;
  const int32_t at = from + position;
  if (at >= static_cast<int32_t>(prompt.size())) return kByteEnd;
  const int32_t token = prompt[static_cast<size_t>(at)];
  return token == '\n' || token >= 256 ? kByteEnd : token;
}

Result<StepOutput> FakeRunner::collect(StepTicket) {
  const auto now = std::chrono::steady_clock::now();
  if (options_.period.count() > 0) {
    // The next point of the grid; where we are late, the grid stays where it is.
    if (next_ == std::chrono::steady_clock::time_point()) next_ = now;
    while (next_ <= now) next_ += options_.period;
    std::this_thread::sleep_until(next_);
  }
  if (options_.per_token.count() > 0) std::this_thread::sleep_for(options_.per_token * tokens_);
  if (options_.fails_after > 0 && static_cast<StepTicket>(options_.fails_after) < tickets_) {
    if (options_.throws) throw std::bad_alloc();
    return error(ErrorCode::kDevice, "the fake device is lost");
  }
  return std::exchange(submitted_, {});
}

Result<StepTicket> FakeRunner::submit(const StepPlan& plan, Precision precision) {
  tokens_ = plan.tokens;
  StepOutput& output = submitted_;
  states_.clear();
  for (const ScheduledSequence& item : plan.items) {
    const Sequence& sequence = *item.sequence;
    const int32_t states = pooled_rows(item), first = item.first + item.count - states;
    std::vector<float>& values = states_.emplace_back(static_cast<size_t>(states) * static_cast<size_t>(hidden()));
    for (int32_t i = 0; i < states; ++i) {
      float* state = values.data() + static_cast<ptrdiff_t>(i) * hidden();
      state[0] = static_cast<float>(sequence.tokens[static_cast<size_t>(first) + static_cast<size_t>(i)]);
      state[1] = static_cast<float>(first + i);
      state[2] = 1;
    }
    output.hidden.push_back({values.data(), DType::kF32, hidden(), first, states});
    const SamplingParams& sampling = sequence.request.sampling;
    auto& prompt_scores = output.prompt_logprobs.emplace_back();
    if (sampling.prompt_logprobs) {
      for (int32_t t = item.first + 1; t < std::min(item.first + item.count + 1, sequence.prompt_size()); ++t) {
        prompt_scores.push_back(scored(sequence.tokens[static_cast<size_t>(t)], *sampling.prompt_logprobs, precision));
      }
    }
    if (!item.samples) continue;
    int32_t token = answer(sequence, sequence.output_size());
    if (options_.fp8_says > 0 && !is_exact(precision) && sequence.output_size() == 9) token = options_.fp8_says;
    const int32_t alternatives = sampling.logprobs ? sampling.top_logprobs : 0;
    output.sampled.push_back(scored(first_allowed(sequence, sequence.output_size(), token), alternatives, precision));
    std::vector<OutputToken>& accepted = output.accepted.emplace_back();
    for (int32_t right = 1; right <= std::min(item.drafts, right_drafts_); ++right) {
      const int32_t place = sequence.output_size() + right;
      accepted.push_back(scored(first_allowed(sequence, place, answer(sequence, place)), alternatives, precision));
    }
    if (item.drafts > 0) right_drafts_ = (right_drafts_ + 1) % (options_.drafts + 1);
  }
  return tickets_++;
}

}  // namespace nfp::server
