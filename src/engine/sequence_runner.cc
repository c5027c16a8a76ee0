#include "engine/sequence_runner.h"

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
  std::vector<int32_t> table(static_cast<size_t>((context + kBlockSize - 1) / kBlockSize));
  std::iota(table.begin(), table.end(), 0);
  NFP_ASSIGN_OR_RETURN(runner->cache_,
                       backend.make_kv_cache(model.kv_spec(static_cast<int64_t>(table.size()), kBlockSize, kv_dtype)));
  NFP_ASSIGN_OR_RETURN(runner->table_, backend.allocate(table.size() * sizeof(int32_t)));
  NFP_RETURN_IF_ERROR(backend.upload(runner->table_.data(), table.data(), runner->table_.bytes()));
  const auto ints = static_cast<size_t>(runner->max_feed_) * 3 + 3;
  NFP_ASSIGN_OR_RETURN(runner->step_, backend.allocate(ints * sizeof(int32_t)));
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
  std::vector<int32_t> arrays(tokens.begin(), tokens.end());
  for (int repeat = 0; repeat < 2; ++repeat) {  // positions, and slots: the table is the identity
    for (int32_t i = 0; i < count; ++i) arrays.push_back(length_ + i);
  }
  arrays.insert(arrays.end(), {0, count, length_ + count});
  NFP_RETURN_IF_ERROR(model_.backend().upload(step_.data(), arrays.data(), arrays.size() * sizeof(int32_t)));
  const auto* base = step_.as<int32_t>();
  ForwardArgs args;
  args.batch.tokens = count;
  args.batch.sequences = 1;
  args.batch.max_query = count;
  args.batch.max_context = length_ + count;
  args.batch.table_width = static_cast<int32_t>(table_.bytes() / sizeof(int32_t));
  args.batch.token_ids = base;
  args.batch.positions = base + count;
  args.batch.slots = base + 2 * count;
  args.batch.query_start = base + 3 * count;
  args.batch.context = base + 3 * count + 2;
  args.batch.block_table = table_.as<int32_t>();
  args.precision = precision;
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
    model_.logits(rows_.as<int32_t>(), part, precision, logits_.as<float>());
    NFP_RETURN_IF_ERROR(model_.backend().download(out + static_cast<size_t>(done) * vocab, logits_.data(),
                                                  static_cast<size_t>(part) * vocab * sizeof(float)));
  }
  return ok_status();
}

}  // namespace nfp
