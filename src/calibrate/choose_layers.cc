#include "calibrate/choose_layers.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "base/float_types.h"
#include "calibrate/compensation.h"
#include "calibrate/descent.h"
#include "eval/sequence_runner.h"
#include "nested/format.h"

namespace nfp {
namespace {

// Values of the backend's activation type as FP32.
Status download(Backend& backend, const void* from, size_t count, std::vector<float>& out) {
  out.resize(count);
  const DType dtype = backend.activation_dtype();
  if (dtype == DType::kF32) return backend.download(out.data(), from, count * sizeof(float));
  std::vector<uint16_t> bits(count);
  NFP_RETURN_IF_ERROR(backend.download(bits.data(), from, count * sizeof(uint16_t)));
  std::transform(bits.begin(), bits.end(), out.begin(), dtype == DType::kF16 ? fp16_to_fp32 : bf16_to_fp32);
  return ok_status();
}

// Hands the inputs of linear layers on as FP32: x is [rows, k].
class InputObserver final : public LinearObserver {
 public:
  using Take = std::function<void(const Linear& linear, const std::vector<float>& x, int32_t rows)>;
  InputObserver(Backend& backend, Take take) : backend_(backend), take_(std::move(take)) {}

  void on_linear(const Linear& linear, void* x, int32_t rows) override {
    const auto count = static_cast<size_t>(rows) * static_cast<size_t>(linear.weight->k());
    if (status_.ok()) status_ = download(backend_, x, count, values_);
    if (status_.ok()) take_(linear, values_, rows);
  }
  void on_error(const Error& error) override { status_ = error; }
  const Status& status() const { return status_; }

 private:
  Backend& backend_;
  Take take_;
  Status status_;
  std::vector<float> values_;
};

// The text on its way through the model: every sequence's hidden states before the layer that is next.
class TextPass {
 public:
  TextPass(Model& model, SequenceRunner& runner, const TokenSequences& text, Precision precision)
      : model_(model), runner_(runner), text_(text), precision_(precision), states_(text.size()) {}

  // Sequence i through a layer, to the states before the next.
  Status advance(size_t i, int32_t layer, LinearObserver* observer) {
    NFP_RETURN_IF_ERROR(feed(i, {layer, layer + 1, observer, nullptr}));
    states_[i].resize(state_bytes(i));
    return model_.backend().download(states_[i].data(), model_.hidden().data(), states_[i].size());
  }
  // Sequence i up to the inputs of `until`: x [tokens, k], and the residual stream r [tokens, hidden] as it is then.
  Status read_inputs(size_t i, const Linear& until, std::vector<float>& x, std::vector<float>& r) {
    InputObserver observer(model_.backend(), [&](const Linear& linear, const std::vector<float>& values, int32_t) {
      if (&linear == &until) x = values;
    });
    NFP_RETURN_IF_ERROR(feed(i, {until.layer, until.layer + 1, &observer, &until}));
    NFP_RETURN_IF_ERROR(observer.status());
    const size_t count = text_[i].size() * static_cast<size_t>(model_.config().hidden);
    return download(model_.backend(), model_.hidden().data(), count, r);
  }
  // Sequence i up to the inputs of the layer's experts, of which `until` is one.
  Status read_expert_inputs(size_t i, const Linear& until, const InputObserver::Take& take) {
    InputObserver observer(model_.backend(), [&](const Linear& linear, const std::vector<float>& x, int32_t rows) {
      if (linear.expert >= 0 && linear.type == until.type) take(linear, x, rows);
    });
    NFP_RETURN_IF_ERROR(feed(i, {until.layer, until.layer + 1, &observer, &until}));
    return observer.status();
  }

 private:
  Status feed(size_t i, const LayerRange& layers) {
    if (layers.first > 0) {
      NFP_RETURN_IF_ERROR(model_.backend().upload(model_.hidden().data(), states_[i].data(), states_[i].size()));
    }
    runner_.restart();
    return runner_.feed(text_[i], precision_, layers);
  }
  size_t state_bytes(size_t i) const {
    return text_[i].size() * static_cast<size_t>(model_.config().hidden) * size_of(model_.backend().activation_dtype());
  }

  Model& model_;
  SequenceRunner& runner_;
  const TokenSequences& text_;
  Precision precision_;
  std::vector<std::vector<std::byte>> states_;
};

// What one linear layer is fed over the text.
struct InputSums {
  explicit InputSums(int64_t cols) : hessian(cols) {}
  Hessian hessian;
  std::optional<CrossSum> inputs, residual;  // with compensation
};

// How many of the linear layers from the first on are told of their inputs at once: all experts' gate and up, or down.
size_t told_together(std::span<Linear* const> linears) {
  const auto differs = [&](const Linear* linear) {
    return linear->expert < 0 || linear->type != linears.front()->type;
  };
  const auto end = std::find_if(linears.begin(), linears.end(), differs);
  return std::max<size_t>(1, static_cast<size_t>(end - linears.begin()));
}

class LayerChooser {
 public:
  LayerChooser(LoadedModel& loaded, const TokenSequences& text, const CalibrationOptions& options,
               const CalibrationStore& store, SequenceRunner& runner)
      : loaded_(loaded),
        text_(text),
        options_(options),
        store_(store),
        tokens_(static_cast<uint64_t>(count_tokens(text))),
        compensate_(compensates(options)),
        exact_(*loaded.model, runner, text, Precision::kFp16),
        fp8_(*loaded.model, runner, text, Precision::kFp8),
        loader_(*loaded.source, *loaded.backend, *loaded.threads, chosen_options()) {}

  Status run() {
    int32_t last = loaded_.config.layers;  // no need to go on after the last one that is missing
    while (last > 0 && store_.layer(last - 1)) --last;
    total_ = 0;
    for (int32_t layer = 0; layer < last; ++layer) total_ += tokens_ * (compensate_ ? passes_of(layer) : 1);
    if (compensate_) {
      for (Linear* linear : loaded_.model->linears()) linear->fp8 = false;
    }
    for (int32_t layer = 0; layer < last; ++layer) {
      const std::vector<Linear*> linears = linears_of(layer);
      auto stored = store_.layer(layer);
      NFP_RETURN_IF_ERROR(compensate_ ? choose_compensating(layer, linears, std::move(stored))
                                      : choose(layer, linears, stored.has_value()));
    }
    return ok_status();
  }

 private:
  std::vector<Linear*> linears_of(int32_t layer) const {
    std::vector<Linear*> linears = loaded_.model->linears();
    std::erase_if(linears, [&](const Linear* l) { return l->layer != layer || l->type == GemmType::kHead; });
    return linears;
  }

  // Of the text: up to each linear layer (in both precisions at once), and twice through the whole layer.
  uint64_t passes_of(int32_t layer) const {
    const std::vector<Linear*> linears = linears_of(layer);
    uint64_t passes = 2;
    for (size_t i = 0; i < linears.size(); i += told_together(std::span(linears).subspan(i))) ++passes;
    return passes;
  }

  // Exact inputs: all linear layers of the layer are told in one pass.
  Status choose(int32_t layer, std::span<Linear* const> linears, bool stored) {
    std::map<const Linear*, InputSums> sums;
    InputObserver observer(*loaded_.backend, [&](const Linear& linear, const std::vector<float>& x, int32_t rows) {
      sums.try_emplace(&linear, linear.weight->k()).first->second.hessian.add(x.data(), rows, *loaded_.threads);
    });
    for (size_t i = 0; i < text_.size(); ++i) {
      NFP_RETURN_IF_ERROR(exact_.advance(i, layer, stored ? nullptr : &observer));
      NFP_RETURN_IF_ERROR(observer.status());
      tell(i);
    }
    if (stored) return ok_status();
    std::vector<UpperChoice> choices;
    for (const Linear* linear : linears) {
      // An expert that no token of the text went to keeps the nearest upper bytes: there is nothing to go by.
      InputSums& inputs = sums.try_emplace(linear, linear->weight->k()).first->second;
      NFP_RETURN_IF_ERROR(choose_linear(*linear, inputs, choices));
    }
    return store_.save_layer(layer, choices);
  }

  // One linear layer after the other, each fed what those before it make of the text in FP8.
  Status choose_compensating(int32_t layer, std::span<Linear* const> linears,
                             std::optional<std::vector<UpperChoice>> stored) {
    std::vector<UpperChoice> choices;
    if (stored) {
      choices = std::move(*stored);
      for (uint64_t pass = 2; pass < passes_of(layer); ++pass) {
        for (size_t s = 0; s < text_.size(); ++s) tell(s);
      }
      NFP_RETURN_IF_ERROR(take(layer, linears, choices, linears.size()));
    } else {
      for (size_t i = 0, count = 0; i < linears.size(); i += count) {
        count = told_together(linears.subspan(i));
        if (linears[i]->expert >= 0) {
          NFP_RETURN_IF_ERROR(choose_experts(linears.subspan(i, count), choices));
        } else {
          NFP_ASSIGN_OR_RETURN(InputSums sums, sum_errors(*linears[i]));
          NFP_RETURN_IF_ERROR(choose_linear(*linears[i], sums, choices));
        }
        NFP_RETURN_IF_ERROR(take(layer, linears, choices, i + count));
      }
      NFP_RETURN_IF_ERROR(store_.save_layer(layer, choices));
    }
    for (TextPass* pass : {&exact_, &fp8_}) {
      for (size_t i = 0; i < text_.size(); ++i) {
        NFP_RETURN_IF_ERROR(pass->advance(i, layer, nullptr));
        tell(i);
      }
    }
    return ok_status();
  }

  // Experts are not compensated: the tokens that an expert is given differ between FP16 and FP8, so that there is no
  // exact input to compare each with.
  Status choose_experts(std::span<Linear* const> experts, std::vector<UpperChoice>& choices) {
    std::map<const Linear*, InputSums> sums;
    for (const Linear* expert : experts) sums.try_emplace(expert, expert->weight->k());
    for (size_t i = 0; i < text_.size(); ++i) {
      NFP_RETURN_IF_ERROR(fp8_.read_expert_inputs(i, *experts.front(),
                                                  [&](const Linear& expert, const std::vector<float>& x, int32_t rows) {
                                                    sums.at(&expert).hessian.add(x.data(), rows, *loaded_.threads);
                                                  }));
      tell(i);
    }
    for (const Linear* expert : experts) NFP_RETURN_IF_ERROR(choose_linear(*expert, sums.at(expert), choices));
    return ok_status();
  }

  Result<InputSums> sum_errors(const Linear& linear) {
    const int64_t cols = linear.weight->k(), hidden = loaded_.config.hidden;
    InputSums sums(cols);
    sums.inputs.emplace(cols, cols);
    // Where a norm follows, what the layer computes is not what is added to the residual stream.
    const bool added = !loaded_.config.family->has(TensorRole::kAttentionPostNorm);
    if (added && (linear.type == GemmType::kOutput || linear.type == GemmType::kDown)) {
      sums.residual.emplace(hidden, cols);
    }
    std::vector<float> x, r, fp8_x, fp8_r;
    const auto subtract = [](std::vector<float>& from, const std::vector<float>& what) {
      std::transform(from.begin(), from.end(), what.begin(), from.begin(), std::minus<>());
    };
    for (size_t i = 0; i < text_.size(); ++i) {
      NFP_RETURN_IF_ERROR(exact_.read_inputs(i, linear, x, r));
      NFP_RETURN_IF_ERROR(fp8_.read_inputs(i, linear, fp8_x, fp8_r));
      const auto rows = static_cast<int64_t>(text_[i].size());
      sums.hessian.add(fp8_x.data(), rows, *loaded_.threads);
      subtract(x, fp8_x);
      sums.inputs->add(x.data(), fp8_x.data(), rows, *loaded_.threads);
      if (sums.residual) {
        subtract(r, fp8_r);
        sums.residual->add(r.data(), fp8_x.data(), rows, *loaded_.threads);
      }
      tell(i);
    }
    return sums;
  }

  // Adds the choices for a linear layer's nested matrices to `out`.
  Status choose_linear(const Linear& linear, InputSums& sums, std::vector<UpperChoice>& out) {
    Hessian& hessian = sums.hessian;
    NFP_RETURN_IF_ERROR(hessian.finish(options_.damping, linear.names.front()));
    NFP_ASSIGN_OR_RETURN(const GptqFactor factor, factorise(hessian, linear.names.front(), *loaded_.threads));
    for (const std::string& name : linear.names) {
      const std::string tensor = name + ".weight";
      NFP_ASSIGN_OR_RETURN(const auto reader, loaded_.source->matrix(tensor, *loaded_.threads));
      if (reader->storage() != Storage::kNested) continue;
      const int64_t rows = reader->rows(), cols = reader->cols();
      const auto count = static_cast<size_t>(rows * cols);
      std::vector<uint8_t> upper(count), lower(count);
      std::vector<int8_t> exponent(static_cast<size_t>(rows));
      NFP_RETURN_IF_ERROR(reader->read_nested(0, rows, upper.data(), lower.data(), exponent.data()));
      std::vector<uint16_t> nested(count);
      for (size_t i = 0; i < count; ++i) nested[i] = join(upper[i], lower[i]);
      std::vector<float> shift;
      if (sums.inputs) {
        // Of the layers that add to the residual stream each is one matrix: its rows are the stream's features.
        const CompensationInputs errors = {&*sums.inputs, sums.residual ? &*sums.residual : nullptr};
        shift = find_shifts(factor, errors, nested, exponent, *loaded_.threads);
      }
      UpperChoice choice{tensor, rows, cols, options_.rule, {}};
      choice.bits.resize(static_cast<size_t>(rows * choice_row_bytes(cols)));
      choose_uppers(factor, nested, rows, options_.rule, *loaded_.threads, choice.bits, shift);
      descend(hessian, nested, rows, options_.rule, *loaded_.threads, choice.bits, shift);
      out.push_back(std::move(choice));
    }
    return ok_status();
  }

  // The model computes the first `count` linear layers of the layer in FP8 with these choices from now on.
  Status take(int32_t layer, std::span<Linear* const> linears, const std::vector<UpperChoice>& choices, size_t count) {
    for (const UpperChoice& choice : choices) chosen_[choice.name] = std::make_shared<const UpperChoice>(choice);
    NFP_RETURN_IF_ERROR(loaded_.model->reload(layer, loader_));
    for (size_t i = 0; i < linears.size(); ++i) linears[i]->fp8 = i < count;
    return ok_status();
  }

  LoadOptions chosen_options() {
    LoadOptions options;
    options.filter = [this](const std::string& tensor,
                            std::unique_ptr<MatrixReader> reader) -> Result<std::unique_ptr<MatrixReader>> {
      const auto found = chosen_.find(tensor);
      if (found == chosen_.end()) return reader;
      return make_chosen_reader(std::move(reader), found->second);
    };
    return options;
  }

  void tell(size_t sequence) {
    done_ += text_[sequence].size();
    if (options_.progress) options_.progress({"calibrating", std::min(done_, total_), total_});
  }

  LoadedModel& loaded_;
  const TokenSequences& text_;
  const CalibrationOptions& options_;
  const CalibrationStore& store_;
  uint64_t tokens_;
  bool compensate_;
  TextPass exact_, fp8_;
  std::map<std::string, std::shared_ptr<const UpperChoice>, std::less<>> chosen_;
  WeightLoader loader_;
  uint64_t done_ = 0, total_ = 0;
};

}  // namespace

Status choose_layers(LoadedModel& loaded, const TokenSequences& text, const CalibrationOptions& options,
                     const CalibrationStore& store) {
  const int32_t length = longest_sequence(text);
  NFP_ASSIGN_OR_RETURN(const auto runner, SequenceRunner::create(*loaded.model, length, length, DType::kF32));
  return LayerChooser(loaded, text, options, store, *runner).run();
}

}  // namespace nfp
