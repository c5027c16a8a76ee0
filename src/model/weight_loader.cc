#include <algorithm>
#include <utility>

#include "model/baseline.h"
#include "model/families.h"
#include "model/model.h"

namespace nfp {

WeightLoader::WeightLoader(const ModelSource& source, Backend& backend, ThreadPool& threads, const LoadOptions& options)
    : source_(source), backend_(backend), threads_(threads), options_(options) {}

void WeightLoader::tell(const std::string& tensor) {
  const TensorInfo* found = source_.find(tensor);
  if (found != nullptr) done_ += found->file_bytes;
  if (options_.progress) options_.progress({"loading", std::min(done_, source_.file_bytes()), source_.file_bytes()});
}

Result<std::unique_ptr<MatrixReader>> WeightLoader::matrix(const std::string& name, int64_t cols, GemmType type) {
  NFP_ASSIGN_OR_RETURN(std::unique_ptr<MatrixReader> reader, source_.matrix(name, threads_));
  if (reader->cols() != cols) {
    return error(ErrorCode::kInvalidInput, "{}: tensor '{}' has {} columns, but config.json implies {}", source_.path(),
                 name, reader->cols(), cols);
  }
  if (options_.filter) {
    NFP_ASSIGN_OR_RETURN(reader, options_.filter(name, std::move(reader)));
  }
  switch (options_.baseline) {
    case Baseline::kNone:
      return reader;
    case Baseline::kFp8Channel:
      // The head and the embedding stay 16-bit, as those who ship per-channel FP8 leave them.
      if (type == GemmType::kHead && !options_.fp8_head) return reader;
      return make_fp8_channel_reader(std::move(reader));
    case Baseline::kDenseF16:
      return make_dense_reader(std::move(reader));
  }
  return reader;
}

Result<Linear> WeightLoader::linear(GemmType type, int32_t layer, const std::vector<std::string>& names, int64_t rows,
                                    int64_t cols, bool bias, RowOrder order) {
  std::vector<std::unique_ptr<MatrixReader>> readers;
  LinearSpec spec;
  spec.order = order;
  int64_t total = 0;
  for (const std::string& name : names) {
    NFP_ASSIGN_OR_RETURN(std::unique_ptr<MatrixReader> reader, matrix(name + ".weight", cols, type));
    total += reader->rows();
    spec.parts.push_back(reader.get());
    if (bias) {
      const size_t before = spec.bias.size();
      spec.bias.resize(before + static_cast<size_t>(reader->rows()));
      NFP_RETURN_IF_ERROR(source_.read_f32(name + ".bias", std::span(spec.bias).subspan(before)));
    }
    readers.push_back(std::move(reader));
  }
  if (total != rows) {
    return error(ErrorCode::kInvalidInput, "{}: tensor '{}.weight'{} has {} rows, but config.json implies {}",
                 source_.path(), names.front(), names.size() > 1 ? " and those stacked with it" : "", total, rows);
  }
  if (order == RowOrder::kInterleave && 2 * readers.front()->rows() != rows) {
    return error(ErrorCode::kInvalidInput,
                 "{}: tensors '{}.weight' and '{}.weight' must have as many rows as each other", source_.path(),
                 names.front(), names.back());
  }
  Linear linear;
  NFP_ASSIGN_OR_RETURN(linear.weight, backend_.make_linear(spec));
  linear.type = type;
  linear.layer = layer;
  linear.names = names;
  linear.fp8 = type != GemmType::kHead || options_.fp8_head;
  for (const std::string& name : names) tell(name + ".weight");
  return linear;
}

Result<Buffer> WeightLoader::vector(const std::string& name, int64_t size) {
  const TensorInfo* tensor = source_.find(name);
  if (tensor == nullptr) {
    return error(ErrorCode::kInvalidInput, "{}: tensor '{}' is missing; the checkpoint is incomplete", source_.path(),
                 name);
  }
  if (tensor->shape.elements() != size) {
    return error(ErrorCode::kInvalidInput, "{}: tensor '{}' has {} elements, but config.json implies {}",
                 source_.path(), name, tensor->shape.elements(), size);
  }
  std::vector<float> values(static_cast<size_t>(size));
  NFP_RETURN_IF_ERROR(source_.read_f32(name, values));
  tell(name);
  return upload(values);
}

Result<Buffer> WeightLoader::upload(const std::vector<float>& values) {
  NFP_ASSIGN_OR_RETURN(Buffer buffer, backend_.allocate(values.size() * sizeof(float)));
  NFP_RETURN_IF_ERROR(backend_.upload(buffer.data(), values.data(), buffer.bytes()));
  return buffer;
}

Result<std::vector<float>> WeightLoader::rope_factors(int32_t size) const {
  std::vector<float> factors;
  const TensorInfo* tensor = source_.find("rope_freqs.weight");
  if (tensor == nullptr) return factors;
  if (tensor->shape.elements() != size) {
    return error(ErrorCode::kInvalidInput, "{}: tensor 'rope_freqs.weight' has {} elements; half the head size is {}",
                 source_.path(), tensor->shape.elements(), size);
  }
  factors.resize(static_cast<size_t>(size));
  NFP_RETURN_IF_ERROR(source_.read_f32("rope_freqs.weight", factors));
  for (float factor : factors) {
    if (!(factor > 0.0f)) {
      return error(ErrorCode::kInvalidInput, "{}: tensor 'rope_freqs.weight' holds {}; factors must be above 0",
                   source_.path(), factor);
    }
  }
  return factors;
}

Result<std::unique_ptr<Model>> load_model(const ModelSource& source, const ModelConfig& config, Backend& backend,
                                          ThreadPool& threads, const LoadOptions& options) {
  const Family* family = find_family(config.architecture, config.model_type);
  if (family == nullptr) {
    return error(ErrorCode::kUnsupported, "{}: architecture '{}' is not supported; supported are {}", source.path(),
                 config.architecture, family_names());
  }
  WeightLoader weights(source, backend, threads, options);
  return family->load(config, weights);
}

}  // namespace nfp
