// A Hugging Face directory: config.json and safetensors, sharded or not.
#include <cstring>
#include <utility>

#include "base/mapped_file.h"
#include "io/json_object.h"
#include "io/nested_layout.h"
#include "io/safetensors_set.h"
#include "io/sources.h"

namespace nfp {
namespace {

class DirectorySource final : public ModelSource {
 public:
  explicit DirectorySource(const std::string& path) : ModelSource(SourceKind::kHuggingFace, path) {}

  Status open_files(std::string config) {
    config_json_ = std::move(config);
    NFP_ASSIGN_OR_RETURN(set_, SafetensorsSet::open(path_, kModelFile, kModelIndex));
    for (const StoredTensor& tensor : set_.tensors()) {
      add_tensor({tensor.name, tensor.dtype, std::string(info(tensor.dtype).safetensors_name), tensor.shape,
                  tensor.bytes.size()});
    }
    return read_gguf_tokenizer_file();
  }

  Status read_rows(const TensorInfo& tensor, int64_t first, int64_t count, std::byte* out) const override {
    const auto row = static_cast<size_t>(tensor.row_elements()) * size_of(tensor.dtype);
    const auto bytes = stored(tensor).bytes.subspan(static_cast<size_t>(first) * row, static_cast<size_t>(count) * row);
    if (!bytes.empty()) std::memcpy(out, bytes.data(), bytes.size());
    return ok_status();
  }
  void release(const TensorInfo& tensor) const override { stored(tensor).file->release(stored(tensor).bytes); }

 private:
  // Tensors were added in the set's order.
  const StoredTensor& stored(const TensorInfo& tensor) const { return set_.tensors()[&tensor - tensors().data()]; }

  SafetensorsSet set_;
};

}  // namespace

Result<std::unique_ptr<ModelSource>> open_directory(const std::string& path) {
  NFP_ASSIGN_OR_RETURN(std::string config, read_text_file(path + "/config.json", size_t{16} << 20));
  if (config.find("\"nestedfp\"") != std::string::npos) {
    NFP_ASSIGN_OR_RETURN(const auto json, parse_json_object(config, path + "/config.json"));
    if (json.contains("nestedfp")) return open_nested(path, std::move(config));
  }
  auto source = std::make_unique<DirectorySource>(path);
  NFP_RETURN_IF_ERROR(source->open_files(std::move(config)));
  return std::unique_ptr<ModelSource>(std::move(source));
}

}  // namespace nfp
