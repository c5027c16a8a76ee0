#include "calibrate/sensitivity.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/json_depth.h"
#include "eval/sequence_runner.h"

namespace nfp {
namespace {

void log_softmax(std::span<float> row) {
  const float top = *std::max_element(row.begin(), row.end());
  double sum = 0;
  for (float value : row) sum += std::exp(value - top);
  const float shift = top + static_cast<float>(std::log(sum));
  for (float& value : row) value -= shift;
}

double divergence(std::span<const float> base, std::span<const float> other) {
  double sum = 0;
  for (size_t v = 0; v < base.size(); ++v) {
    sum += static_cast<double>(std::exp(base[v])) * (static_cast<double>(base[v]) - other[v]);
  }
  return sum;
}

// Runs one sequence again and again, each time from one layer on.
class Prober {
 public:
  Prober(Model& model, SequenceRunner& runner, ThreadPool& threads, const SensitivityOptions& options)
      : model_(model), runner_(runner), threads_(threads), options_(options) {}

  // Exact hidden states before every layer, and exact distributions.
  Status start(std::span<const int32_t> tokens) {
    tokens_ = tokens;
    const int32_t layers = model_.config().layers;
    states_.resize(static_cast<size_t>(layers));
    for (int32_t layer = 0; layer < layers; ++layer) {
      runner_.restart();
      NFP_RETURN_IF_ERROR(runner_.feed(tokens, Precision::kFp16, {layer == 0 ? 0 : layer - 1, layer, nullptr}));
      NFP_RETURN_IF_ERROR(save(states_[static_cast<size_t>(layer)]));
    }
    runner_.restart();
    NFP_RETURN_IF_ERROR(runner_.feed(tokens, Precision::kFp16, {layers - 1, layers, nullptr}));
    return distributions(base_);
  }

  // KL divergence, in all, over the scored positions, with this layer's FP8 set as it is now.
  Result<double> probe(int32_t layer) {
    const Buffer& hidden = model_.hidden();
    const std::vector<std::byte>& state = states_[static_cast<size_t>(layer)];
    NFP_RETURN_IF_ERROR(model_.backend().upload(hidden.data(), state.data(), state.size()));
    runner_.restart();
    // Layer 0 starts from the embedding, which is exact in every precision.
    NFP_RETURN_IF_ERROR(runner_.feed(tokens_, options_.precision, {layer, -1, nullptr}));
    NFP_RETURN_IF_ERROR(distributions(mine_));
    const auto vocab = static_cast<size_t>(model_.config().vocab);
    std::vector<double> part(base_.size() / vocab);
    threads_.parallel_for(static_cast<int64_t>(part.size()), 1, [&](Range range) {
      for (int64_t i = range.begin; i < range.end; ++i) {
        const auto at = static_cast<size_t>(i);
        part[at] = divergence(std::span(base_).subspan(at * vocab, vocab), std::span(mine_).subspan(at * vocab, vocab));
      }
    });
    return std::accumulate(part.begin(), part.end(), 0.0);
  }

  int64_t scored() const { return static_cast<int64_t>(base_.size()) / model_.config().vocab; }

 private:
  Status save(std::vector<std::byte>& state) {
    Backend& backend = model_.backend();
    state.resize(tokens_.size() * static_cast<size_t>(model_.config().hidden) * size_of(backend.activation_dtype()));
    return backend.download(state.data(), model_.hidden().data(), state.size());
  }

  Status distributions(std::vector<float>& out) {
    const auto vocab = static_cast<size_t>(model_.config().vocab);
    const auto count = static_cast<int32_t>(tokens_.size());
    const int32_t first = count / 2;
    const int32_t stride = std::max(1, (count - first) / options_.scored);
    out.clear();
    std::vector<float> row(vocab);
    for (int32_t t = first; t < count; t += stride) {
      NFP_RETURN_IF_ERROR(runner_.logits(t, 1, Precision::kFp16, row.data()));
      out.insert(out.end(), row.begin(), row.end());
    }
    threads_.parallel_for(static_cast<int64_t>(out.size() / vocab), 1, [&](Range range) {
      for (int64_t i = range.begin; i < range.end; ++i) {
        log_softmax(std::span(out).subspan(static_cast<size_t>(i) * vocab, vocab));
      }
    });
    return ok_status();
  }

  Model& model_;
  SequenceRunner& runner_;
  ThreadPool& threads_;
  const SensitivityOptions& options_;
  std::span<const int32_t> tokens_;
  std::vector<std::vector<std::byte>> states_;  // [layers] of [tokens, hidden]
  std::vector<float> base_, mine_;              // [scored, vocab] log-probabilities
};

bool is_head(const Linear& linear) { return linear.type == GemmType::kHead; }

double weights_of(const Linear& linear) { return static_cast<double>(linear.weight->n() * linear.weight->k()); }

}  // namespace

Result<std::vector<Sensitivity>> measure_sensitivity(Model& model, const TokenSequences& text,
                                                     const SensitivityOptions& options, ThreadPool& threads,
                                                     const ProgressCallback& progress) {
  std::vector<Linear*> linears = model.linears();
  std::erase_if(linears, [](const Linear* linear) { return is_head(*linear); });
  size_t longest = 0;
  for (const auto& sequence : text) longest = std::max(longest, sequence.size());
  if (longest < 2) return error(ErrorCode::kInvalidInput, "no text to measure the layers' sensitivity on");
  std::vector<bool> before;
  before.reserve(linears.size());
  for (Linear* linear : linears) before.push_back(std::exchange(linear->fp8, false));  // a step's share stays 1

  const auto measure = [&]() -> Result<std::vector<Sensitivity>> {
    const auto length = static_cast<int32_t>(longest);
    NFP_ASSIGN_OR_RETURN(const auto runner, SequenceRunner::create(model, length, length));
    Prober prober(model, *runner, threads, options);
    std::vector<Sensitivity> order(linears.size());
    const uint64_t total = linears.size() * text.size();
    uint64_t done = 0;
    int64_t scored = 0;
    for (const std::vector<int32_t>& sequence : text) {
      if (sequence.size() < 2) continue;
      NFP_RETURN_IF_ERROR(prober.start(sequence));
      scored += prober.scored();
      for (size_t i = 0; i < linears.size(); ++i) {
        linears[i]->fp8 = true;
        auto harm = prober.probe(linears[i]->layer);
        linears[i]->fp8 = false;
        NFP_ASSIGN_OR_RETURN(const double kld, std::move(harm));
        order[i].kld += kld;
        if (progress) progress({"measuring sensitivity", ++done, total});
      }
    }
    for (size_t i = 0; i < linears.size(); ++i) {
      order[i].matrices = linears[i]->names;
      order[i].weights = linears[i]->weight->n() * linears[i]->weight->k();
      order[i].kld /= static_cast<double>(scored);
      if (!std::isfinite(order[i].kld)) {
        return error(ErrorCode::kInvalidInput, "{}: the model's outputs overflow when it computes in FP8",
                     order[i].matrices.front());
      }
    }
    return order;
  };
  auto order = measure();
  for (size_t i = 0; i < linears.size(); ++i) linears[i]->fp8 = before[i];
  if (order.ok()) {
    std::stable_sort(order->begin(), order->end(), [](const Sensitivity& a, const Sensitivity& b) {
      return a.kld * static_cast<double>(b.weights) < b.kld * static_cast<double>(a.weights);
    });
  }
  return order;
}

std::vector<Sensitivity> default_fp8_order(Model& model) {
  const auto place = [](const Linear* linear) {
    switch (linear->type) {
      case GemmType::kGateUp:
        return 0;
      case GemmType::kDown:
        return 1;
      case GemmType::kOutput:
        return 2;
      case GemmType::kQkv:
      case GemmType::kHead:
        break;
    }
    return 3;
  };
  std::vector<Linear*> linears = model.linears();
  std::erase_if(linears, [](const Linear* linear) { return is_head(*linear); });
  std::stable_sort(linears.begin(), linears.end(), [&](const Linear* a, const Linear* b) {
    return place(a) != place(b) ? place(a) < place(b) : a->layer < b->layer;
  });
  std::vector<Sensitivity> order;
  order.reserve(linears.size());
  for (const Linear* linear : linears) {
    order.push_back({.matrices = linear->names, .weights = linear->weight->n() * linear->weight->k()});
  }
  return order;
}

Status set_fp8_order(Model& model, std::span<const Sensitivity> order) {
  std::vector<Linear*> linears = model.linears();
  std::erase_if(linears, [](const Linear* linear) { return is_head(*linear); });
  double total = 0;
  for (const Linear* linear : linears) total += weights_of(*linear);
  std::vector<Linear*> sorted;
  for (const Sensitivity& entry : order) {
    const auto found = std::find_if(linears.begin(), linears.end(),
                                    [&](const Linear* linear) { return linear->names == entry.matrices; });
    if (found == linears.end()) {
      return error(ErrorCode::kInvalidInput, "the sensitivity order names '{}', which this model does not have",
                   entry.matrices.empty() ? std::string() : entry.matrices.front());
    }
    sorted.push_back(*found);
  }
  for (Linear* linear : linears) linear->fp8_from = 1.0;
  double taken = 0;  // whole numbers below 2^53: exact
  for (Linear* linear : sorted) {
    taken += weights_of(*linear);
    linear->fp8_from = taken / total;
  }
  return ok_status();
}

Result<double> set_fp8_share(Model& model, std::span<const Sensitivity> order, double share) {
  NFP_RETURN_IF_ERROR(set_fp8_order(model, order));
  double total = 0, taken = 0;
  for (Linear* linear : model.linears()) {
    if (is_head(*linear)) continue;
    linear->fp8 = linear->fp8_from <= share;
    total += weights_of(*linear);
    if (linear->fp8) taken += weights_of(*linear);
  }
  return total > 0 ? taken / total : 0.0;
}

std::string sensitivity_to_json(std::span<const Sensitivity> order) {
  auto list = nlohmann::ordered_json::array();
  for (const Sensitivity& entry : order) {
    list.push_back({{"matrices", entry.matrices}, {"weights", entry.weights}, {"kld", entry.kld}});
  }
  return list.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

Result<std::vector<Sensitivity>> sensitivity_from_json(std::string_view json, const std::string& where) {
  const auto list = parse_file_json<nlohmann::json>(json);
  const auto wrong = [&] {
    return error(ErrorCode::kInvalidInput, "{}: the sensitivity order is not a list of {{matrices, weights, kld}}",
                 where);
  };
  if (!list.is_array()) return wrong();
  std::vector<Sensitivity> order;
  for (const auto& item : list) {
    if (!item.is_object() || !item.contains("matrices") || !item["matrices"].is_array() || item["matrices"].empty() ||
        !item.contains("weights") || !item["weights"].is_number_integer() || item["weights"].get<int64_t>() < 0 ||
        !item.contains("kld") || !item["kld"].is_number()) {
      return wrong();
    }
    Sensitivity entry;
    for (const auto& name : item["matrices"]) {
      if (!name.is_string()) return wrong();
      entry.matrices.push_back(name.get<std::string>());
    }
    entry.weights = item["weights"].get<int64_t>();
    entry.kld = item["kld"].get<double>();
    order.push_back(std::move(entry));
  }
  return order;
}

}  // namespace nfp
