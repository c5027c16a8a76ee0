// A Hugging Face directory: config.json and safetensors, sharded or not.
#include <cstring>
#include <utility>

#include "io/gguf_tokenizer.h"
#include "io/shard_set.h"
#include "io/sources.h"

namespace nfp {
namespace {

class DirectorySource final : public ModelSource {
 public:
  explicit DirectorySource(const std::string& path) : ModelSource(SourceKind::kHuggingFace, path) {}

  Status open_files(std::string config_json) {
    config_json_ = std::move(config_json);
    NFP_ASSIGN_OR_RETURN(shards_, ShardSet::open(path_, "model"));
    for (const SafetensorsEntry* entry : shards_.entries()) {
      add_tensor({entry->name, entry->dtype, std::string(info(entry->dtype).safetensors_name), entry->shape,
                  entry->end - entry->begin});
    }
    NFP_ASSIGN_OR_RETURN(tokenizer_file_, read_tokenizer_gguf(path_, gguf_tokenizer_));
    return ok_status();
  }

  Status read_rows(const TensorInfo& tensor, int64_t first, int64_t count, std::byte* out) const override {
    const auto row = static_cast<size_t>(tensor.row_elements()) * size_of(tensor.dtype);
    const std::span<const std::byte> bytes = shards_.bytes(*shards_.find(tensor.name));
    std::memcpy(out, bytes.data() + static_cast<size_t>(first) * row, static_cast<size_t>(count) * row);
    return ok_status();
  }
  void release(const TensorInfo& tensor) const override { shards_.release(*shards_.find(tensor.name)); }

 private:
  ShardSet shards_;
  MappedFile tokenizer_file_;
};

}  // namespace

Result<std::unique_ptr<ModelSource>> open_plain_directory(const std::string& path, std::string config_json) {
  auto source = std::make_unique<DirectorySource>(path);
  NFP_RETURN_IF_ERROR(source->open_files(std::move(config_json)));
  return std::unique_ptr<ModelSource>(std::move(source));
}

}  // namespace nfp
