// A Hugging Face directory: config.json and safetensors, sharded or not.
#include <simdjson.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>
#include <utility>

#include "base/mapped_file.h"
#include "io/safetensors.h"
#include "io/sources.h"

namespace nfp {
namespace {

constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

class DirectorySource final : public ModelSource {
 public:
  explicit DirectorySource(const std::string& path) : ModelSource(SourceKind::kHuggingFace, path) {}

  Status open_files() {
    NFP_ASSIGN_OR_RETURN(config_json_, read_text_file(path_ + "/config.json", size_t{16} << 20));
    std::error_code code;
    if (std::filesystem::exists(path_ + "/" + kIndex, code)) return open_shards();
    return add_shard(kSingle, nullptr);
  }

  Status read_rows(const TensorInfo& tensor, int64_t first, int64_t count, std::byte* out) const override {
    const auto row = static_cast<size_t>(tensor.row_elements()) * size_of(tensor.dtype);
    const std::span<const std::byte> bytes = view(tensor);
    std::memcpy(out, bytes.data() + static_cast<size_t>(first) * row, static_cast<size_t>(count) * row);
    return ok_status();
  }
  void release(const TensorInfo& tensor) const override { place(tensor).file->release(view(tensor)); }

 private:
  struct Place {
    const MappedFile* file = nullptr;
    uint64_t begin = 0, end = 0;
  };

  const Place& place(const TensorInfo& tensor) const { return places_.at(tensor.name); }
  std::span<const std::byte> view(const TensorInfo& tensor) const {
    const Place& p = place(tensor);
    return p.file->bytes().subspan(p.begin, p.end - p.begin);
  }

  // `expected`: the tensors that the index puts into this shard.
  Status add_shard(const std::string& name, const std::set<std::string>* expected) {
    const std::string file_path = path_ + "/" + name;
    auto mapped = MappedFile::open(file_path);
    if (!mapped.ok()) {
      if (mapped.error().code != ErrorCode::kNotFound) return std::move(mapped).error();
      return error(ErrorCode::kNotFound, "{}: is missing; the download of this model is incomplete", file_path);
    }
    const MappedFile& file = *files_.emplace_back(std::make_unique<MappedFile>(std::move(mapped).value()));
    NFP_ASSIGN_OR_RETURN(SafetensorsHeader header, parse_safetensors(file.bytes(), file_path));
    std::set<std::string> found;
    for (const SafetensorsEntry& entry : header.tensors) {
      if (expected != nullptr && !expected->contains(entry.name)) continue;
      if (!places_.emplace(entry.name, Place{&file, entry.begin, entry.end}).second) {
        return error(ErrorCode::kInvalidInput, "{}: tensor '{}' is in another shard too", file_path, entry.name);
      }
      found.insert(entry.name);
      add_tensor({entry.name, entry.dtype, std::string(info(entry.dtype).safetensors_name), entry.shape,
                  entry.end - entry.begin});
    }
    if (expected != nullptr) {
      for (const std::string& tensor : *expected) {
        if (!found.contains(tensor)) {
          return error(ErrorCode::kInvalidInput, "{}: tensor '{}' is missing, although {} puts it there", file_path,
                       tensor, kIndex);
        }
      }
    }
    return ok_status();
  }

  Status open_shards() {
    const std::string index_path = path_ + "/" + kIndex;
    NFP_ASSIGN_OR_RETURN(const std::string text, read_text_file(index_path));
    simdjson::dom::parser parser;
    simdjson::dom::element root;
    simdjson::dom::object map;
    if (parser.parse(text).get(root) != simdjson::SUCCESS || root["weight_map"].get(map) != simdjson::SUCCESS) {
      return error(ErrorCode::kInvalidInput, "{}: has no object 'weight_map'; download it again", index_path);
    }
    std::map<std::string, std::set<std::string>> shards;
    for (const auto& [tensor, shard] : map) {
      std::string_view file;
      if (shard.get(file) != simdjson::SUCCESS || file.empty() || file.find('/') != std::string_view::npos) {
        return error(ErrorCode::kInvalidInput, "{}: weight_map '{}' does not name a file of this directory", index_path,
                     tensor);
      }
      shards[std::string(file)].insert(std::string(tensor));
    }
    if (shards.empty()) return error(ErrorCode::kInvalidInput, "{}: lists no tensor", index_path);
    for (const auto& [file, tensors] : shards) NFP_RETURN_IF_ERROR(add_shard(file, &tensors));
    return ok_status();
  }

  std::vector<std::unique_ptr<MappedFile>> files_;
  std::map<std::string, Place> places_;
};

}  // namespace

Result<std::unique_ptr<ModelSource>> open_directory(const std::string& path) {
  auto source = std::make_unique<DirectorySource>(path);
  NFP_RETURN_IF_ERROR(source->open_files());
  return std::unique_ptr<ModelSource>(std::move(source));
}

}  // namespace nfp
