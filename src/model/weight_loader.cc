#include "model/weight_loader.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/log.h"
#include "io/opaque_tensor.h"
#include "model/decoder.h"
#include "model/dummy_model.h"

namespace nfp {
namespace {

// Some rows of a matrix.
class RowSlice final : public MatrixReader {
 public:
  RowSlice(const MatrixReader& whole, int64_t begin, int64_t rows) : whole_(whole), begin_(begin), rows_(rows) {}
  int64_t rows() const override { return rows_; }
  int64_t cols() const override { return whole_.cols(); }
  Storage storage() const override { return whole_.storage(); }
  const std::string& name() const override { return whole_.name(); }
  bool uppers_restricted() const override { return whole_.uppers_restricted(); }
  Status read_fp16(int64_t first, int64_t count, uint16_t* out) const override {
    return whole_.read_fp16(begin_ + first, count, out);
  }
  Status read_nested(int64_t first, int64_t count, uint8_t* upper, uint8_t* lower, int8_t* exponent) const override {
    return whole_.read_nested(begin_ + first, count, upper, lower, exponent);
  }
  Status row_factors(int64_t first, int64_t count, float* factor) const override {
    return whole_.row_factors(begin_ + first, count, factor);
  }

 private:
  const MatrixReader& whole_;
  int64_t begin_, rows_;
};

// The row of a stack that is to stand at `row`.
int64_t row_before(const NeighbourPairs& pairs, int64_t row) {
  if (row >= pairs.rows) return row;
  const int64_t inside = row % pairs.head_dim, half = pairs.rotary_dim / 2;
  if (inside >= pairs.rotary_dim) return row;
  return row - inside + (inside < half ? 2 * inside : 2 * (inside - half) + 1);
}

// A matrix of a stack, with its rows in that order. `begin`: its first row's place in the stack.
class PairedRows final : public MatrixReader {
 public:
  PairedRows(const MatrixReader& file, int64_t begin, const NeighbourPairs& pairs)
      : file_(file), begin_(begin), pairs_(pairs) {}
  int64_t rows() const override { return file_.rows(); }
  int64_t cols() const override { return file_.cols(); }
  Storage storage() const override { return file_.storage(); }
  const std::string& name() const override { return file_.name(); }
  bool uppers_restricted() const override { return file_.uppers_restricted(); }
  Status read_fp16(int64_t first, int64_t count, uint16_t* out) const override {
    return for_each(first, count, [&](int64_t row, int64_t i) { return file_.read_fp16(row, 1, out + i * cols()); });
  }
  Status read_nested(int64_t first, int64_t count, uint8_t* upper, uint8_t* lower, int8_t* exponent) const override {
    return for_each(first, count, [&](int64_t row, int64_t i) {
      return file_.read_nested(row, 1, upper + i * cols(), lower + i * cols(), exponent + i);
    });
  }
  Status row_factors(int64_t first, int64_t count, float* factor) const override {
    return for_each(first, count, [&](int64_t row, int64_t i) { return file_.row_factors(row, 1, factor + i); });
  }

 private:
  template <typename F>
  Status for_each(int64_t first, int64_t count, F&& read) const {
    for (int64_t i = 0; i < count; ++i) {
      NFP_RETURN_IF_ERROR(read(row_before(pairs_, begin_ + first + i) - begin_, i));
    }
    return ok_status();
  }

  const MatrixReader& file_;
  int64_t begin_;
  NeighbourPairs pairs_;
};

std::string listed(const std::vector<std::string>& names) {
  constexpr size_t kShown = 8;
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i) {
    text += fmt::format("{}'{}'", i == 0 ? "" : ", ", names[i]);
  }
  if (names.size() > kShown) text += fmt::format(" and {} more", names.size() - kShown);
  return text;
}

// Whether rows first .. first+count-1 of two matrices of the same shape are the same FP16 numbers.
Result<bool> same_rows(const ModelSource& source, const TensorInfo& a, const TensorInfo& b, int64_t first,
                       int64_t count) {
  const auto elements = static_cast<size_t>(count * a.row_elements());
  if (a.dtype == b.dtype) {
    std::vector<std::byte> left(elements * size_of(a.dtype)), right(left.size());
    NFP_RETURN_IF_ERROR(source.read_rows(a, first, count, left.data()));
    NFP_RETURN_IF_ERROR(source.read_rows(b, first, count, right.data()));
    if (left == right) return true;
  }
  std::vector<uint16_t> left(elements), right(elements);
  NFP_RETURN_IF_ERROR(source.read_fp16_rows(a.name, first, count, left.data()));
  NFP_RETURN_IF_ERROR(source.read_fp16_rows(b.name, first, count, right.data()));
  return left == right;
}

// A head that is tied and in the file nevertheless must be the embedding again.
Status check_tied_head(const ModelSource& source, ThreadPool& threads) {
  const std::string head = std::string(kHeadName) + ".weight", table = std::string(kEmbeddingName) + ".weight";
  const TensorInfo *mine = source.find(head), *theirs = source.find(table);
  if (mine == nullptr || theirs == nullptr) return ok_status();
  std::mutex mutex;
  Result<bool> found = mine->shape == theirs->shape;
  std::atomic<bool> same = *found;
  const int64_t step = std::max<int64_t>(1, (1 << 16) / std::max<int64_t>(1, mine->row_elements()));
  threads.parallel_for(same ? mine->rows() : 0, 1, [&](Range range) {
    for (int64_t row = range.begin; row < range.end && same; row += step) {
      Result<bool> equal = same_rows(source, *mine, *theirs, row, std::min(step, range.end - row));
      if (equal.ok() && *equal) continue;
      same = false;
      const std::lock_guard lock(mutex);
      found = std::move(equal);
    }
  });
  source.release(*mine);
  if (!found.ok()) return found.error();
  if (*found) return ok_status();
  return error(
      ErrorCode::kInvalidInput,
      "{}: 'tie_word_embeddings' is true, but '{}' is there and is not '{}'; set it to false if the head is meant",
      source.path(), head, table);
}

// That `tensor` has as many numbers, row by row, as the configuration implies.
Status check_shape(const ModelSource& source, const TensorInfo& tensor, const Shape& implied) {
  if (is_opaque(tensor)) return no_weight(source.path(), tensor);
  const auto differs = [&](int64_t has, const char* what, int64_t wanted) {
    return error(ErrorCode::kInvalidInput, "{}: tensor '{}' has {} {}, but config.json implies {}", source.path(),
                 tensor.name, has, what, wanted);
  };
  const int64_t elements = implied.elements();
  if (implied.rank() < 2 || implied[0] == 1) {  // a GGUF file has a matrix of one row as a vector
    return tensor.shape.elements() == elements ? ok_status() : differs(tensor.shape.elements(), "elements", elements);
  }
  const int64_t rows = implied[0], columns = elements / std::max<int64_t>(1, rows);
  if (tensor.row_elements() != columns) return differs(tensor.row_elements(), "columns", columns);
  return tensor.rows() == rows ? ok_status() : differs(tensor.rows(), "rows", rows);
}

// That the checkpoint has what the configuration implies, and what else it has.
Status check_tensors(const ModelSource& source, const ModelConfig& config, ThreadPool& threads) {
  NFP_RETURN_IF_ERROR(check_complete(source, config));
  std::vector<std::string> extra;
  std::unordered_set<std::string> expected;
  for (DummyTensor& tensor : tensors_of(config)) expected.insert(std::move(tensor.name));
  const bool checks_head = config.tied_embeddings && config.has_head;
  for (const TensorInfo& tensor : source.tensors()) {
    // Frequencies of rotation, which old checkpoints hold, follow from the configuration.
    const bool known = expected.contains(tensor.name) || tensor.name.ends_with("rotary_emb.inv_freq");
    const bool tied = checks_head && tensor.name == std::string(kHeadName) + ".weight";
    if (!known && !tied) extra.push_back(tensor.name);
  }
  if (!extra.empty()) {
    log::warn("{}: {} tensor{} that the configuration does not imply {} ignored: {}", source.path(), extra.size(),
              extra.size() > 1 ? "s" : "", extra.size() > 1 ? "are" : "is", listed(extra));
  }
  return checks_head ? check_tied_head(source, threads) : ok_status();
}

}  // namespace

Status check_complete(const ModelSource& source, const ModelConfig& config) {
  std::vector<std::string> missing;
  Status shapes;
  for (DummyTensor& tensor : tensors_of(config)) {
    const TensorInfo* found = source.find(tensor.name);
    if (found == nullptr) {
      missing.push_back(std::move(tensor.name));
    } else if (shapes.ok()) {
      shapes = check_shape(source, *found, tensor.shape);
    }
  }
  if (missing.empty()) return shapes;
  return error(
      ErrorCode::kInvalidInput,
      "{}: {} of the tensors that config.json implies {} missing: {}; the checkpoint is incomplete, download or "
      "convert it again",
      source.path(), missing.size(), missing.size() > 1 ? "are" : "is", listed(missing));
}

MatrixFilter chain(MatrixFilter first, MatrixFilter second) {
  if (!first || !second) return first ? first : second;
  return [first = std::move(first), second = std::move(second)](
             const std::string& tensor, std::unique_ptr<MatrixReader> reader) -> Result<std::unique_ptr<MatrixReader>> {
    NFP_ASSIGN_OR_RETURN(reader, first(tensor, std::move(reader)));
    return second(tensor, std::move(reader));
  };
}

WeightLoader::WeightLoader(const ModelSource& source, Backend& backend, ThreadPool& threads, const LoadOptions& options)
    : source_(source), backend_(backend), threads_(threads), options_(options) {}

void WeightLoader::tell(const std::string& tensor) {
  const TensorInfo* found = source_.find(tensor);
  if (found != nullptr) done_ += found->file_bytes;
  if (options_.progress) options_.progress({"loading", std::min(done_, source_.file_bytes()), source_.file_bytes()});
}

Result<std::unique_ptr<MatrixReader>> WeightLoader::matrix(const std::string& name, int64_t cols) {
  NFP_ASSIGN_OR_RETURN(std::unique_ptr<MatrixReader> reader, source_.matrix(name, threads_));
  if (reader->cols() != cols) {
    return error(ErrorCode::kInvalidInput, "{}: tensor '{}' has {} columns, but config.json implies {}", source_.path(),
                 name, reader->cols(), cols);
  }
  if (options_.filter) {
    NFP_ASSIGN_OR_RETURN(reader, options_.filter(name, std::move(reader)));
  }
  return reader;
}

Result<Linear> WeightLoader::linear(GemmType type, int32_t layer, const std::vector<std::string>& names, int64_t rows,
                                    int64_t cols, bool bias, RowOrder order, const NeighbourPairs& pairs) {
  std::vector<std::unique_ptr<MatrixReader>> readers;
  LinearSpec spec;
  spec.order = order;
  int64_t total = 0;
  for (const std::string& name : names) {
    NFP_ASSIGN_OR_RETURN(std::unique_ptr<MatrixReader> reader, matrix(name + ".weight", cols));
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
  if (order == RowOrder::kInterleave && names.size() == 1 && rows % 2 == 0) {
    const MatrixReader& both = *readers.front();
    readers.push_back(std::make_unique<RowSlice>(both, 0, rows / 2));
    readers.push_back(std::make_unique<RowSlice>(both, rows / 2, rows / 2));
    spec.parts = {readers[1].get(), readers[2].get()};
  }
  if (order == RowOrder::kInterleave && 2 * spec.parts.front()->rows() != rows) {
    return error(ErrorCode::kInvalidInput,
                 "{}: tensors '{}.weight' and '{}.weight' must have as many rows as each other", source_.path(),
                 names.front(), names.back());
  }
  if (pairs.rows > 0) {
    int64_t begin = 0;
    for (const MatrixReader*& part : spec.parts) {
      if (begin < pairs.rows && part->rows() % pairs.head_dim != 0) {
        return error(ErrorCode::kInvalidInput, "{}: tensor '{}' has {} rows, which heads of {} do not divide",
                     source_.path(), part->name(), part->rows(), pairs.head_dim);
      }
      readers.push_back(std::make_unique<PairedRows>(*part, begin, pairs));
      begin += part->rows();
      part = readers.back().get();
    }
    const std::vector<float> bias_before = spec.bias;
    for (size_t i = 0; i < spec.bias.size(); ++i) {
      spec.bias[i] = bias_before[static_cast<size_t>(row_before(pairs, static_cast<int64_t>(i)))];
    }
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

Result<Buffer> WeightLoader::vector(const std::string& name, int64_t size, float offset, float scale, float most) {
  const std::string full = name + ".weight";
  const TensorInfo* tensor = source_.find(full);
  if (tensor == nullptr) {
    return error(ErrorCode::kInvalidInput, "{}: tensor '{}' is missing; the checkpoint is incomplete", source_.path(),
                 full);
  }
  if (tensor->shape.elements() != size) {
    return error(ErrorCode::kInvalidInput, "{}: tensor '{}' has {} elements, but config.json implies {}",
                 source_.path(), full, tensor->shape.elements(), size);
  }
  std::vector<float> values(static_cast<size_t>(size));
  NFP_RETURN_IF_ERROR(source_.read_f32(full, values));
  for (float& value : values) value = (value + offset) * scale;
  const auto bad = std::find_if(values.begin(), values.end(), [most](float v) { return std::abs(v) > most; });
  if (bad != values.end()) {
    return error(ErrorCode::kInvalidInput, "{}: tensor '{}' has the number {} at {}, where at most {} can be used",
                 source_.path(), full, *bad, bad - values.begin(), most);
  }
  tell(full);
  NFP_ASSIGN_OR_RETURN(Buffer buffer, backend_.allocate(values.size() * sizeof(float)));
  NFP_RETURN_IF_ERROR(backend_.upload(buffer.data(), values.data(), buffer.bytes()));
  return buffer;
}

Result<std::unique_ptr<Model>> load_model(const ModelSource& source, const ModelConfig& config, Backend& backend,
                                          ThreadPool& threads, const LoadOptions& options) {
  NFP_RETURN_IF_ERROR(check_tensors(source, config, threads));
  WeightLoader weights(source, backend, threads, options);
  return load_decoder(config, weights);
}

}  // namespace nfp
