// A Hugging Face directory: config.json and safetensors, sharded or not.
#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "base/log.h"
#include "io/fp8_checkpoint.h"
#include "io/gguf_tokenizer.h"
#include "io/shard_set.h"
#include "io/sources.h"
#include "io/text_model.h"

namespace nfp {
namespace {

// Tensors of the other parts of a multimodal checkpoint, by part: "vision_tower" of "model.vision_tower.x.weight".
class OtherParts {
 public:
  void add(const SafetensorsEntry& entry) {
    std::string_view name = entry.name;
    if (name.starts_with("model.")) name.remove_prefix(6);
    auto& [count, bytes] = parts_[std::string(name.substr(0, name.find('.')))];
    ++count;
    bytes += entry.end - entry.begin;
  }
  void tell(const std::string& path) const {
    std::string text;
    for (const auto& [part, size] : parts_) {
      text += fmt::format("{}{} ({} tensors, {:.1f} MB)", text.empty() ? "" : ", ", part, size.first,
                          static_cast<double>(size.second) * 1e-6);
    }
    log::warn("{}: is read as a text model; ignored: {}", path, text.empty() ? "nothing" : text);
  }

 private:
  std::map<std::string, std::pair<int64_t, uint64_t>> parts_;
};

bool has_entry(const std::vector<const SafetensorsEntry*>& entries, std::string_view name) {
  return std::any_of(entries.begin(), entries.end(), [&](const auto* entry) { return entry->name == name; });
}

// As files have it that were saved from a model without its head, such as those of embeddings: "layers.0.x.weight" in
// place of "model.layers.0.x.weight". transformers reads both.
bool names_lack_model(const std::vector<const SafetensorsEntry*>& entries) {
  const auto is_model = [](const SafetensorsEntry* entry) { return entry->name.starts_with("model."); };
  return std::none_of(entries.begin(), entries.end(), is_model) && has_entry(entries, "embed_tokens.weight");
}

class DirectorySource final : public ModelSource {
 public:
  explicit DirectorySource(const std::string& path) : ModelSource(SourceKind::kHuggingFace, path) {}

  Status open_files(std::string config_json) {
    const std::string file = path_ + "/config.json";
    NFP_ASSIGN_OR_RETURN(auto text_config, text_model_config(config_json, file));
    const bool multimodal = text_config.has_value();
    config_json_ = multimodal ? std::move(*text_config) : std::move(config_json);
    NFP_ASSIGN_OR_RETURN(shards_, ShardSet::open(path_, "model"));
    // What is quantised in other ways is refused with the configuration.
    const auto scheme = find_fp8_scheme(config_json_, file);
    const bool is_fp8 = scheme.ok() && scheme->has_value();
    if (is_fp8) {
      NFP_ASSIGN_OR_RETURN(fp8_, Fp8Weights::open(shards_, **scheme, path_));
    }
    OtherParts others;
    const bool headless = names_lack_model(shards_.entries());
    if (headless && !multimodal && !has_entry(shards_.entries(), "lm_head.weight")) {
      NFP_ASSIGN_OR_RETURN(auto config, headless_config(config_json_, file));
      if (config) config_json_ = std::move(*config);
    }
    for (const SafetensorsEntry* entry : shards_.entries()) {
      const auto name = multimodal                                         ? text_model_tensor(entry->name)
                        : headless && !entry->name.starts_with("lm_head.") ? std::optional("model." + entry->name)
                                                                           : std::optional(entry->name);
      if (!name) {
        others.add(*entry);
      } else if (!is_fp8 || !Fp8Weights::is_scale(entry->name)) {
        NFP_RETURN_IF_ERROR(add(*entry, *name));
      }
    }
    if (multimodal) others.tell(path_);
    if (!fp8_.empty()) stored_fp8_ = StoredFp8{fp8_.text(), fp8_.any_by_rows()};
    NFP_ASSIGN_OR_RETURN(tokenizer_file_, read_tokenizer_gguf(path_, gguf_tokenizer_));
    return ok_status();
  }

  Result<std::unique_ptr<MatrixReader>> matrix(std::string_view name, ThreadPool& threads,
                                               MatrixAnalysis* analysis) const override {
    const TensorInfo* tensor = find(name);
    const Fp8Matrix* fp8 = tensor == nullptr ? nullptr : fp8_.find(stored(*tensor).name);
    if (fp8 == nullptr || fp8->block_rows > 0) return ModelSource::matrix(name, threads, analysis);
    return make_fp8_reader(
        *fp8, shards_.bytes(*fp8->codes), path_ + ": " + tensor->name, [this, tensor] { release(*tensor); }, threads,
        analysis);
  }

  Status read_rows(const TensorInfo& tensor, int64_t first, int64_t count, std::byte* out) const override {
    const SafetensorsEntry& entry = stored(tensor);
    const auto elements = static_cast<size_t>(tensor.row_elements());
    const size_t row = elements * size_of(entry.dtype);
    const std::span<const std::byte> bytes = shards_.bytes(entry).subspan(static_cast<size_t>(first) * row);
    const Fp8Matrix* fp8 = fp8_.find(entry.name);
    if (fp8 == nullptr) {
      std::memcpy(out, bytes.data(), static_cast<size_t>(count) * row);
      return ok_status();
    }
    const auto* codes = reinterpret_cast<const uint8_t*>(bytes.data());
    auto* values = reinterpret_cast<uint16_t*>(out);
    for (int64_t r = first; r < first + count; ++r, codes += elements, values += elements) {
      fp8_row_to_fp16(*fp8, r, std::span(codes, elements), values);
    }
    return ok_status();
  }
  void release(const TensorInfo& tensor) const override { shards_.release(stored(tensor)); }

 private:
  const SafetensorsEntry& stored(const TensorInfo& tensor) const {
    return *entries_[static_cast<size_t>(&tensor - tensors().data())];
  }

  Status add(const SafetensorsEntry& entry, const std::string& name) {
    if (has(name)) return error(ErrorCode::kInvalidInput, "{}: tensor '{}' is there twice", path_, name);
    const DType dtype = fp8_.find(entry.name) != nullptr ? DType::kF16 : entry.dtype;
    add_tensor({name, dtype, entry.stored, entry.shape, entry.end - entry.begin});
    entries_.push_back(&entry);
    return ok_status();
  }

  ShardSet shards_;
  Fp8Weights fp8_;
  std::vector<const SafetensorsEntry*> entries_;  // in the order of tensors()
  MappedFile tokenizer_file_;
};

}  // namespace

Result<std::unique_ptr<ModelSource>> open_plain_directory(const std::string& path, std::string config_json) {
  auto source = std::make_unique<DirectorySource>(path);
  NFP_RETURN_IF_ERROR(source->open_files(std::move(config_json)));
  return std::unique_ptr<ModelSource>(std::move(source));
}

}  // namespace nfp
