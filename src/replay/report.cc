#include "replay/report.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>

namespace nfp {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr double kTight = 5, kLoose = 10;  // times of a request alone

std::string percent(const std::optional<double>& share) {
  return share && std::isfinite(*share) ? fmt::format("{:.1f}", 100 * *share) : "-";
}

OrderedJson to_json(const Percentiles& p) {
  return {{"mean", p.mean}, {"p50", p.p50}, {"p90", p.p90}, {"p99", p.p99}, {"max", p.worst}};
}

// What the reasons' names in kLevelChangeNames mean to a reader of the report.
std::string reasons_of(const ReplaySummary& row) {
  const std::map<std::string, std::string_view> words = {{"first_tokens", "for first tokens in time"},
                                                         {"pace", "for the pace of answers"},
                                                         {"room", "back, as there was room"},
                                                         {"rule", "by the policy's rule"},
                                                         {"requests", "as requests asked for it"}};
  std::string text;
  for (const auto& [reason, count] : row.switch_reasons) {
    const auto known = words.find(reason);
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", count, known == words.end() ? reason : known->second);
  }
  return text;
}

OrderedJson optional(const std::optional<double>& value) {
  return value && std::isfinite(*value) ? OrderedJson(*value) : OrderedJson();
}

template <typename Key>
OrderedJson to_json(const std::map<Key, ReplayGroup>& groups, const char* by) {
  OrderedJson rows = OrderedJson::array();
  for (const auto& [key, group] : groups) {
    rows.push_back({{by, key},
                    {"requests", group.requests},
                    {"failed", group.failed},
                    {"attainment_tight", optional(group.tight)},
                    {"attainment_loose", optional(group.loose)},
                    {"ttft_s", to_json(group.ttft)},
                    {"tpot_s", to_json(group.tpot)}});
  }
  return rows;
}

template <typename Key>
std::string to_text(const std::map<Key, ReplayGroup>& groups, const char* by) {
  std::string text;
  for (const auto& [key, group] : groups) {
    text += fmt::format("  {} {}: {} request{}", by, key, group.requests, group.requests == 1 ? "" : "s");
    if (group.failed > 0) text += fmt::format(" ({} failed)", group.failed);
    if (group.tight) text += fmt::format(", {} % tight, {} % loose", percent(group.tight), percent(group.loose));
    text += fmt::format(", TTFT p50 {:.3f}, p90 {:.3f}, worst {:.2f} s\n", group.ttft.p50, group.ttft.p90,
                        group.ttft.worst);
  }
  return text;
}

// Whether a request's times are at most so many times those of the request alone.
bool attains(const ReplayedRequest& request, const AloneTimes& alone, double factor) {
  return request.ttft_s <= factor * alone.ttft_s && request.tpot_s <= factor * alone.tpot_s;
}

template <typename Key, typename KeyOf>
std::map<Key, ReplayGroup> grouped(const ReplayOutcome& outcome, const StepModel* model, int32_t max_step_tokens,
                                   const KeyOf& key_of) {
  std::map<Key, std::vector<const ReplayedRequest*>> by_key;
  for (const ReplayedRequest& request : outcome.requests) by_key[key_of(request.asked)].push_back(&request);
  std::map<Key, ReplayGroup> groups;
  if (by_key.size() < 2) return groups;
  for (const auto& [key, requests] : by_key) {
    ReplayGroup& group = groups[key];
    group.requests = std::ssize(requests);
    std::vector<double> ttft, tpot;
    int64_t tight = 0, loose = 0;
    for (const ReplayedRequest* request : requests) {
      if (!request->done) {
        ++group.failed;
        continue;
      }
      ttft.push_back(request->ttft_s);
      if (request->output > 1) tpot.push_back(request->tpot_s);
      if (model == nullptr) continue;
      const AloneTimes times = alone(*model, request->asked, max_step_tokens);
      tight += attains(*request, times, kTight) ? 1 : 0;
      loose += attains(*request, times, kLoose) ? 1 : 0;
    }
    group.ttft = percentiles(std::move(ttft));
    group.tpot = percentiles(std::move(tpot));
    if (model == nullptr) continue;
    group.tight = static_cast<double>(tight) / static_cast<double>(group.requests);
    group.loose = static_cast<double>(loose) / static_cast<double>(group.requests);
  }
  return groups;
}

}  // namespace

Percentiles percentiles(std::vector<double> values) {
  Percentiles found;
  if (values.empty()) return found;
  std::sort(values.begin(), values.end());
  for (const double value : values) found.mean += value / static_cast<double>(values.size());
  const auto at = [&](double share) {  // nearest rank
    const auto rank = static_cast<size_t>(std::ceil(share * static_cast<double>(values.size())));
    return values[std::clamp<size_t>(rank, 1, values.size()) - 1];
  };
  found.p50 = at(0.5);
  found.p90 = at(0.9);
  found.p99 = at(0.99);
  found.worst = values.back();
  return found;
}

Result<GoodputLimits> parse_goodput(const std::vector<std::string>& texts) {
  GoodputLimits limits;
  for (const std::string& text : texts) {
    const size_t colon = text.find(':');
    const std::string name = text.substr(0, colon);
    double ms = 0;
    const char* begin = colon == std::string::npos ? nullptr : text.data() + colon + 1;
    const char* end = text.data() + text.size();
    const bool number = begin != nullptr && std::from_chars(begin, end, ms).ptr == end && ms > 0 && std::isfinite(ms);
    if (!number || (name != "ttft" && name != "tpot" && name != "e2el")) {
      return error(ErrorCode::kUsage, "--goodput {}: use ttft:MS, tpot:MS or e2el:MS", text);
    }
    (name == "ttft" ? limits.ttft_s : name == "tpot" ? limits.tpot_s : limits.e2e_s) = ms / 1e3;
  }
  return limits;
}

Result<KlCurve> parse_kl(const std::vector<std::string>& texts) {
  KlCurve curve;
  if (texts.empty()) return curve;
  curve[0] = 0;
  for (const std::string& text : texts) {
    const char* end = text.data() + text.size();
    double share = 0, nats = 0;
    const auto first = std::from_chars(text.data(), end, share);
    const bool one = first.ec == std::errc() && first.ptr != end && *first.ptr == ':' && share > 0 && share <= 1;
    const auto second = one ? std::from_chars(first.ptr + 1, end, nats) : first;
    if (!one || second.ec != std::errc() || second.ptr != end || !(nats >= 0) || !std::isfinite(nats)) {
      return error(ErrorCode::kUsage, "--kl {}: use SHARE:NATS, such as 0.5:0.0023", text);
    }
    curve[share] = nats;
  }
  if (!curve.contains(1) || curve[1] <= 0) {
    return error(ErrorCode::kUsage, "--kl: the divergence of FP8 in all weights is needed too, 1:NATS");
  }
  return curve;
}

double kl_at(const KlCurve& curve, double share) {
  const auto above = curve.lower_bound(share);
  if (above == curve.end()) return curve.rbegin()->second;
  if (above->first == share || above == curve.begin()) return above->second;
  const auto below = std::prev(above);
  const double part = (share - below->first) / (above->first - below->first);
  return below->second + part * (above->second - below->second);
}

ReplaySummary summarize(const ReplayOutcome& outcome, const std::string& policy, const StepModel* model,
                        int32_t max_step_tokens, const GoodputLimits& limits, const KlCurve& kl) {
  ReplaySummary row;
  row.policy = policy;
  row.requests = std::ssize(outcome.requests);
  row.seconds = outcome.seconds;
  row.steps = outcome.steps;
  row.fp8_steps = outcome.fp8_steps;
  row.switches = outcome.switches;
  row.switch_reasons = outcome.switch_reasons;
  row.preemptions = outcome.preemptions;
  std::vector<double> ttft, tpot, e2e, gap;
  int64_t fp16 = 0, fp8 = 0, fp16_output = 0, output = 0, good = 0, judged = 0, own = 0, input = 0, cached = 0;
  std::array<int64_t, 4> met{};
  double last_arrival = 0;
  for (const ReplayedRequest& request : outcome.requests) {
    last_arrival = std::max(last_arrival, request.asked.arrival_s);
    if (!request.done) {
      ++row.failed;
      continue;
    }
    ttft.push_back(request.ttft_s);
    e2e.push_back(request.e2e_s);
    if (request.output > 1) tpot.push_back(request.tpot_s), gap.push_back(request.longest_gap_s);
    fp16 += request.fp16_tokens;
    fp8 += request.fp8_tokens;
    fp16_output += request.fp16_output;
    output += request.output;
    input += request.asked.input;
    cached += request.cached;
    judged += request.own_met ? 1 : 0;
    own += request.own_met.value_or(false) ? 1 : 0;
    good += request.ttft_s <= limits.ttft_s.value_or(std::numeric_limits<double>::infinity()) &&
                    request.tpot_s <= limits.tpot_s.value_or(std::numeric_limits<double>::infinity()) &&
                    request.e2e_s <= limits.e2e_s.value_or(std::numeric_limits<double>::infinity())
                ? 1
                : 0;
    if (model == nullptr) continue;
    const AloneTimes times = alone(*model, request.asked, max_step_tokens);
    for (size_t i = 0; i < 2; ++i) {
      const double factor = i == 0 ? kTight : kLoose;
      met[i] += attains(request, times, factor) ? 1 : 0;
      met[2 + i] += request.e2e_s <= factor * times.e2e_s ? 1 : 0;
    }
  }
  if (row.requests > 1 && last_arrival > 0) row.rate = static_cast<double>(row.requests - 1) / last_arrival;
  const auto share = [&](int64_t count) { return static_cast<double>(count) / std::max<double>(1, row.requests); };
  if (model != nullptr) {
    row.tight = share(met[0]), row.loose = share(met[1]), row.e2e_tight = share(met[2]), row.e2e_loose = share(met[3]);
  }
  if (judged > 0) row.own = share(own);
  if (input > 0) row.cached = static_cast<double>(cached) / static_cast<double>(input);
  if (limits.any() && row.seconds > 0) row.goodput = static_cast<double>(good) / row.seconds;
  row.fp16_share = fp16 + fp8 > 0 ? static_cast<double>(fp16) / static_cast<double>(fp16 + fp8)
                                  : std::numeric_limits<double>::quiet_NaN();
  row.fp16_answers = fp16 + fp8 > 0 && output > 0 ? static_cast<double>(fp16_output) / static_cast<double>(output)
                                                  : std::numeric_limits<double>::quiet_NaN();
  double computed = 0, weights = 0, nats = 0;
  for (const auto& [share_of_weights, count] : outcome.tokens_by_share) {
    const auto tokens = static_cast<double>(count);
    computed += tokens;
    weights += tokens * share_of_weights;
    if (!kl.empty()) nats += tokens * kl_at(kl, share_of_weights);
  }
  if (computed > 0) row.fp8_weights = weights / computed;
  if (computed > 0 && !kl.empty()) row.kl_ratio = nats / computed / kl.at(1);
  row.ttft = percentiles(std::move(ttft));
  row.tpot = percentiles(std::move(tpot));
  row.e2e = percentiles(std::move(e2e));
  row.gap = percentiles(std::move(gap));
  if (row.seconds > 0) row.output_rate = static_cast<double>(output) / row.seconds;
  row.joules = outcome.joules;
  if (row.joules && output > 0) row.joules_per_token = *row.joules / static_cast<double>(output);
  row.by_priority =
      grouped<int32_t>(outcome, model, max_step_tokens, [](const TraceRequest& asked) { return asked.priority; });
  row.by_precision = grouped<std::string>(outcome, model, max_step_tokens, [](const TraceRequest& asked) {
    return std::string(name_of(asked.precision.value_or(PrecisionClass::kAuto)));
  });
  return row;
}

std::string to_text(const ReplayReport& report) {
  std::string text;
  if (!report.rows.empty()) {
    text += fmt::format("{:<16} {:>7} {:>7} {:>7} {:>7} {:>7} {:>9} {:>9} {:>9} {:>9} {:>9} {:>8} {:>8} {:>6}\n",
                        "policy", "req/s", "tight %", "loose %", "FP16 %", "FP8 w %", "TTFT p50", "p90", "worst s",
                        "TPOT p50", "p90 ms", "gap ms", "goodput", "KL %");
  }
  for (const ReplaySummary& row : report.rows) {
    text += fmt::format(
        "{:<16} {:>7.2f} {:>7} {:>7} {:>7} {:>7} {:>9.3f} {:>9.3f} {:>9.2f} {:>9.1f} {:>9.1f} {:>8.0f} {:>8} {:>6}\n",
        row.policy, row.rate, percent(row.tight), percent(row.loose), percent(row.fp16_share), percent(row.fp8_weights),
        row.ttft.p50, row.ttft.p90, row.ttft.worst, 1e3 * row.tpot.p50, 1e3 * row.tpot.p90, 1e3 * row.gap.worst,
        row.goodput ? fmt::format("{:.2f}", *row.goodput) : "-", percent(row.kl_ratio));
    if (row.switches > 0) text += fmt::format("  precision changed {} times: {}\n", row.switches, reasons_of(row));
    if (row.own && row.policy == "server")
      text += fmt::format("  {} % met the server's own targets for them\n", percent(row.own));
    if (row.cached >= 0.01) {  // prompts are random: a run before had the same ones
      text += fmt::format(
          "  {} % of the prompts' tokens were in the server's prefix cache, which shortens times: as after a "
          "run with the same --seed\n",
          percent(row.cached));
    }
    if (row.joules) {
      text += fmt::format("  GPU energy {:.0f} J, {:.3f} J an answer's token\n", *row.joules,
                          row.joules_per_token.value_or(0));
    }
    if (row.failed > 0) text += fmt::format("  of these {} of {} failed\n", row.failed, row.requests);
    text += to_text(row.by_priority, "priority") + to_text(row.by_precision, "precision");
  }
  for (const ReplayReport::Limit& limit : report.limits) {
    const double share = 100 * report.attainment.value_or(0);
    text += limit.rate > 0 ? fmt::format("{:<16} {:>7.2f} req/s at {:.1f} % within 5 times of a request alone\n",
                                         limit.policy, limit.rate, share)
                           : fmt::format("{:<16} holds at no rate {:.1f} % within 5 times of a request alone\n",
                                         limit.policy, share);
  }
  return text;
}

std::string to_json(const ReplayReport& report) {
  OrderedJson rows = OrderedJson::array();
  for (const ReplaySummary& row : report.rows) {
    // Only what is simulated tells of its steps.
    const auto of_steps = [&row](uint64_t count) { return row.steps > 0 ? OrderedJson(count) : OrderedJson(nullptr); };
    rows.push_back({{"policy", row.policy},
                    {"rate", row.rate},
                    {"requests", row.requests},
                    {"failed", row.failed},
                    {"attainment_tight", optional(row.tight)},
                    {"attainment_loose", optional(row.loose)},
                    {"attainment_e2e_tight", optional(row.e2e_tight)},
                    {"attainment_e2e_loose", optional(row.e2e_loose)},
                    {"attainment_own_targets", optional(row.own)},
                    {"cached_prompt_share", row.policy == "server" ? OrderedJson(row.cached) : OrderedJson(nullptr)},
                    {"request_goodput", optional(row.goodput)},
                    {"fp16_token_share", optional(row.fp16_share)},
                    {"fp16_answer_share", optional(row.fp16_answers)},
                    {"fp8_weight_share", optional(row.fp8_weights)},
                    {"kl_of_fp8s", optional(row.kl_ratio)},
                    {"ttft_s", to_json(row.ttft)},
                    {"tpot_s", to_json(row.tpot)},
                    {"e2e_s", to_json(row.e2e)},
                    {"longest_gap_s", to_json(row.gap)},
                    {"output_tokens_per_s", row.output_rate},
                    {"gpu_joules", optional(row.joules)},
                    {"gpu_joules_per_output_token", optional(row.joules_per_token)},
                    {"seconds", row.seconds},
                    {"steps", of_steps(row.steps)},
                    {"fp8_steps", of_steps(row.fp8_steps)},
                    {"switches", row.switches},
                    {"switch_reasons", row.switch_reasons},
                    {"preemptions", of_steps(row.preemptions)},
                    {"by_priority", to_json(row.by_priority, "priority")},
                    {"by_precision", to_json(row.by_precision, "precision")}});
  }
  OrderedJson limits = OrderedJson::array();
  for (const auto& limit : report.limits) limits.push_back({{"policy", limit.policy}, {"rate", limit.rate}});
  OrderedJson json = {
      {"command", report.command}, {"trace", report.trace}, {"machine", report.machine}, {"rows", rows}};
  if (report.attainment) {
    json["attainment"] = *report.attainment;
    json["highest_rates"] = limits;
  }
  return json.dump(1, ' ', false, OrderedJson::error_handler_t::replace);
}

std::string to_csv(const ReplayReport& report) {
  std::string text =
      "policy,rate,arrival_s,input,output,done,ttft_s,tpot_s,e2e_s,longest_gap_s,fp16_tokens,fp8_tokens,"
      "priority,precision\n";
  for (size_t i = 0; i < report.outcomes.size(); ++i) {
    for (const ReplayedRequest& r : report.outcomes[i].requests) {
      text += fmt::format("{},{:.4f},{:.6f},{},{},{},{:.6f},{:.6f},{:.6f},{:.6f},{},{},{},{}\n", report.rows[i].policy,
                          report.rows[i].rate, r.asked.arrival_s, r.asked.input, r.asked.output, r.done ? 1 : 0,
                          r.ttft_s, r.tpot_s, r.e2e_s, r.longest_gap_s, r.fp16_tokens, r.fp8_tokens, r.asked.priority,
                          name_of(r.asked.precision.value_or(PrecisionClass::kAuto)));
    }
  }
  return text;
}

}  // namespace nfp
