#include "io/split_source.h"

#include <nlohmann/json.hpp>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "io/family.h"
#include "io/model_json.h"

namespace nfp {
namespace {

struct HeadRows {
  int64_t query = 0, key_value = 0;
};

int64_t size_field(const nlohmann::json& config, const char* field, int64_t otherwise) {
  const auto found = config.find(field);
  if (found == config.end() || !found->is_number_integer()) return otherwise;
  const int64_t value = found->get<int64_t>();
  return value >= 0 && value <= 1 << 24 ? value : 0;
}

std::string model_type_of(const nlohmann::json& config) {
  const auto found = config.find("model_type");
  return found != config.end() && found->is_string() ? found->get<std::string>() : std::string();
}

HeadRows head_rows(const nlohmann::json& config) {
  const int64_t heads = size_field(config, "num_attention_heads", 0);
  if (heads == 0) return {};
  const int64_t dim = size_field(config, "head_dim", size_field(config, "hidden_size", 0) / heads);
  return {heads * dim, size_field(config, "num_key_value_heads", heads) * dim};
}

class SplitSource final : public ModelSource {
 public:
  explicit SplitSource(std::shared_ptr<const ModelSource> inner)
      : ModelSource(inner->kind(), inner->path()), inner_(std::move(inner)) {}

  Status open(const Family& family, const Family& names, const HeadRows& heads) {
    describe_as(*inner_);
    for (const TensorInfo& tensor : inner_->tensors()) {
      const auto role = tensor.shape.rank() == 2 && tensor.name.ends_with(".weight") ? role_of(family, tensor.name)
                                                                                     : std::optional<TensorRole>();
      const int64_t rows = tensor.rows();
      if ((role == TensorRole::kQueryKeyValue || role == TensorRole::kGateUp) && rows == 0) {
        return error(ErrorCode::kInvalidInput, "{}: tensor '{}' is empty; the checkpoint is damaged", path_,
                     tensor.name);
      }
      const bool whole_heads = heads.query > 0 && heads.key_value > 0 && rows == heads.query + 2 * heads.key_value;
      if (role == TensorRole::kQueryKeyValue && whole_heads) {
        NFP_RETURN_IF_ERROR(add_part(tensor, names, TensorRole::kQuery, 0, heads.query));
        NFP_RETURN_IF_ERROR(add_part(tensor, names, TensorRole::kKey, heads.query, heads.key_value));
        NFP_RETURN_IF_ERROR(
            add_part(tensor, names, TensorRole::kValue, heads.query + heads.key_value, heads.key_value));
      } else if (role == TensorRole::kGateUp && rows % 2 == 0) {
        NFP_RETURN_IF_ERROR(add_part(tensor, names, TensorRole::kGate, 0, rows / 2));
        NFP_RETURN_IF_ERROR(add_part(tensor, names, TensorRole::kUp, rows / 2, rows / 2));
      } else if (has(tensor.name)) {
        return named_twice(tensor.name);
      } else {
        add_tensor(tensor);
      }
    }
    return ok_status();
  }

  std::optional<std::string> tokenizer_gguf() const override { return inner_->tokenizer_gguf(); }

  Result<std::unique_ptr<MatrixReader>> matrix(std::string_view name, ThreadPool& threads,
                                               MatrixAnalysis* analysis) const override {
    return parts_.contains(name) ? ModelSource::matrix(name, threads, analysis)
                                 : inner_->matrix(name, threads, analysis);
  }
  Status read_rows(const TensorInfo& tensor, int64_t first, int64_t count, std::byte* out) const override {
    const auto part = parts_.find(tensor.name);
    if (part == parts_.end()) return inner_->read_rows(*inner_->find(tensor.name), first, count, out);
    return inner_->read_rows(*part->second.whole, part->second.first + first, count, out);
  }
  void release(const TensorInfo& tensor) const override {
    const auto part = parts_.find(tensor.name);
    inner_->release(part == parts_.end() ? *inner_->find(tensor.name) : *part->second.whole);
  }

 private:
  struct Part {
    const TensorInfo* whole;
    int64_t first;  // row
  };

  Error named_twice(const std::string& name) const {
    return error(ErrorCode::kInvalidInput, "{}: tensor '{}' is named like a part of another; the checkpoint is damaged",
                 path_, name);
  }

  Status add_part(const TensorInfo& tensor, const Family& names, TensorRole role, int64_t first, int64_t rows) {
    // With the layer as the file spells it: of layers "0" and "00", which are different names, so are the parts.
    constexpr std::string_view kLayers = "model.layers.", kFirst = "model.layers.0";
    TensorInfo part = tensor;
    part.name = tensor.name.substr(0, tensor.name.find('.', kLayers.size())) +
                names.name(role, 0).substr(kFirst.size()) + ".weight";
    // One name for two tensors would take one's shape and the other's rows.
    if (inner_->has(part.name)) return named_twice(part.name);
    if (!parts_.emplace(part.name, Part{&tensor, first}).second) return named_twice(tensor.name);
    part.part_of = tensor.name;
    part.shape = {rows, tensor.shape[1]};
    part.file_bytes = tensor.file_bytes / static_cast<uint64_t>(tensor.rows()) * static_cast<uint64_t>(rows);
    add_tensor(std::move(part));
    return ok_status();
  }

  const std::shared_ptr<const ModelSource> inner_;
  std::map<std::string, Part, std::less<>> parts_;
};

}  // namespace

Result<std::shared_ptr<const ModelSource>> split_fused(std::shared_ptr<const ModelSource> source) {
  if (source->stored_fp8()) return source;
  const auto config = parse_model_json<nlohmann::json>(source->config_json(), source->path() + "/config.json");
  if (!config.ok()) return source;
  const auto family = find_family("", model_type_of(*config));
  const auto names = find_family("LlamaForCausalLM", "");
  if (!family.ok() || !names.ok()) return source;
  if (!family->family->has(TensorRole::kQueryKeyValue) && !family->family->has(TensorRole::kGateUp)) return source;
  auto split = std::make_shared<SplitSource>(std::move(source));
  NFP_RETURN_IF_ERROR(split->open(*family->family, *names->family, head_rows(*config)));
  return std::shared_ptr<const ModelSource>(std::move(split));
}

}  // namespace nfp
