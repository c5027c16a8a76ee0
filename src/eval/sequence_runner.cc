#include "eval/sequence_runner.h"

#include <algorithm>
#include <numeric>

namespace nfp {

Result<std::unique_ptr<SequenceRunner>> SequenceRunner::create(Model& model, int32_t context, int32_t max_feed,
                                                               DType kv_dtype) {
  if (context < 1 || context > model.config().max_context) {
    return error(ErrorCode::kUsage, "a context of {} tokens was asked for, but this model has {}", context,
                 model.config().max_context);
  }
  std::unique_ptr<SequenceRunner> runner(new SequenceRunner(model));
  runner->context_ = context;
  runner->max_feed_ = std::clamp(max_feed, 1, context);
  Backend& backend = model.backend();
  NFP_RETURN_IF_ERROR(model.reserve(runner->max_feed_, kLogitRows, context));
  std::vector<int32_t>& table = runner->table_;
  table.resize(static_cast<size_t>((context + kBlockSize - 1) / kBlockSize));
  std::iota(table.begin(), table.end(), 0);
  NFP_ASSIGN_OR_RETURN(runner->cache_,
                       backend.make_kv_cache(model.kv_spec(static_cast<int64_t>(table.size()), kBlockSize, kv_dtype)));
  StepLimits limits;
  limits.tokens = runner->max_feed_;
  limits.sequences = 1;
  limits.table_width = static_cast<int32_t>(table.size());
  limits.vocab = model.config().vocab;
  limits.block_size = kBlockSize;
  NFP_ASSIGN_OR_RETURN(runner->input_, StepInput::create(backend, limits));
  NFP_ASSIGN_OR_RETURN(runner->rows_, backend.allocate(kLogitRows * sizeof(int32_t)));
  const auto vocab = static_cast<size_t>(model.config().vocab);
  NFP_ASSIGN_OR_RETURN(runner->logits_, backend.allocate(kLogitRows * vocab * sizeof(float)));
  return runner;
}

Status SequenceRunner::feed(std::span<const int32_t> tokens, Precision precision, const LayerRange& layers) {
  const auto count = static_cast<int32_t>(tokens.size());
  if (count < 1 || count > max_feed_ || length_ + count > context_) {
    return error(ErrorCode::kInvalidInput, "{} tokens after {} do not fit a context of {} fed {} at a time", count,
                 length_, context_, max_feed_);
  }
  StepShape shape;
  shape.tokens = count;
  shape.sequences = 1;
  shape.single = count == 1 ? 1 : 0;
  input_->begin(0, shape);
  input_->add({.tokens = tokens, .first = length_, .source = -1, .blocks = table_});
  input_->upload();
  ForwardArgs args;
  args.batch = input_->view(shape, nullptr);
  args.precision = computed_precision(model_.backend(), precision);
  args.cache = cache_.get();
  args.first_layer = layers.first;
  args.end_layer = layers.end;
  args.observer = layers.observer;
  args.until = layers.until;
  model_.forward(args);
  length_ += count;
  return model_.backend().synchronize();
}

Status SequenceRunner::logits(int32_t first, int32_t count, Precision precision, float* out) {
  const auto vocab = static_cast<size_t>(model_.config().vocab);
  for (int32_t done = 0; done < count; done += kLogitRows) {
    const int32_t part = std::min(kLogitRows, count - done);
    std::vector<int32_t> rows(static_cast<size_t>(part));
    std::iota(rows.begin(), rows.end(), first + done);
    NFP_RETURN_IF_ERROR(model_.backend().upload(rows_.data(), rows.data(), rows.size() * sizeof(int32_t)));
    model_.logits(rows_.as<int32_t>(), part, computed_precision(model_.backend(), precision), logits_.as<float>());
    NFP_RETURN_IF_ERROR(model_.backend().download(out + static_cast<size_t>(done) * vocab, logits_.data(),
                                                  static_cast<size_t>(part) * vocab * sizeof(float)));
  }
  return ok_status();
}

}  // namespace nfp
