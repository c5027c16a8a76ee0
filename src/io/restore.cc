#include <algorithm>
#include <filesystem>
#include <optional>
#include <utility>

#include "base/atomic_file.h"
#include "base/mapped_file.h"
#include "io/checkpoint_writer.h"
#include "io/convert.h"
#include "io/nested_layout.h"
#include "io/safetensors.h"

namespace nfp {
namespace {

namespace fs = std::filesystem;

// One safetensors file of the original: its header's text and the tensors in the order of their data.
struct OriginalFile {
  std::string name;
  std::string header;
  std::vector<const TensorInfo*> tensors;
  uint64_t data_bytes = 0;
};

class Restorer {
 public:
  Restorer(const ModelSource& source, const RestoreOptions& options, ThreadPool& threads)
      : source_(source), options_(options), threads_(threads) {}

  Result<RestoreReport> run(const std::string& dst) {
    if (source_.kind() != SourceKind::kNested) {
      return error(ErrorCode::kUsage, "{}: is not a nested checkpoint; `nestedfp convert` makes one", source_.path());
    }
    NFP_ASSIGN_OR_RETURN(const NestedHeader header,
                         parse_nested_header(source_.config_json(), source_.path() + "/config.json"));
    for (const auto& [tensor, count] : header.inexact) report_.inexact += count;
    uint64_t needed = 0;
    for (const TensorInfo& tensor : source_.tensors()) needed += tensor.bytes();
    NFP_ASSIGN_OR_RETURN(OutputDirectory out, OutputDirectory::create(dst, options_.force, source_.path(), needed));
    if (Status status = write(out); !status.ok()) return out.at_place(std::move(status).error());
    return report_;
  }

 private:
  Status write(OutputDirectory& out) {
    ProgressCounter progress(options_.progress, "restoring", source_.file_bytes());
    NFP_ASSIGN_OR_RETURN(const std::vector<OriginalFile> originals, original_files());
    report_.same_files = !originals.empty();
    if (originals.empty()) {
      NFP_RETURN_IF_ERROR(write_anew(out, progress));
    } else {
      for (const OriginalFile& file : originals) {
        NFP_ASSIGN_OR_RETURN(auto writer,
                             SafetensorsWriter::create_with_header(out.file(file.name), file.header, file.data_bytes));
        for (const TensorInfo* tensor : file.tensors) {
          NFP_RETURN_IF_ERROR(copy_tensor(source_, *tensor, writer, threads_, progress));
        }
        NFP_RETURN_IF_ERROR(writer.finish());
        report_.bytes += file.data_bytes;
      }
      NFP_ASSIGN_OR_RETURN(const auto index, source_.text_file(std::string(kSourceFolder) + "/" + kModelIndex));
      if (index) NFP_RETURN_IF_ERROR(write_file(out.file(kModelIndex), *index));
    }
    NFP_ASSIGN_OR_RETURN(auto config, source_.text_file(std::string(kSourceFolder) + "/config.json"));
    if (!config) {
      NFP_ASSIGN_OR_RETURN(config, plain_config(source_.config_json(), source_.path() + "/config.json"));
    }
    NFP_RETURN_IF_ERROR(write_file(out.file("config.json"), *config));
    NFP_RETURN_IF_ERROR(copy_side_files(source_, out));
    return out.commit();
  }

  // Empty where the original was not safetensors, or cannot be had back file by file.
  Result<std::vector<OriginalFile>> original_files() const {
    std::vector<OriginalFile> files;
    std::error_code code;
    const std::string folder = source_.path() + "/" + kSourceFolder;
    fs::directory_iterator place(folder, code), end;
    for (; !code && place != end; place.increment(code)) {
      std::string name = place->path().filename().string();
      if (!name.ends_with(kHeaderSuffix)) continue;
      OriginalFile& file = files.emplace_back();
      NFP_ASSIGN_OR_RETURN(file.header, read_text_file(place->path().string()));
      file.name = name.substr(0, name.size() - std::string_view(kHeaderSuffix).size());
      NFP_RETURN_IF_ERROR(match(file, place->path().string()));
    }
    std::sort(files.begin(), files.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
    size_t tensors = 0;
    for (const OriginalFile& file : files) tensors += file.tensors.size();
    if (!files.empty() && tensors != source_.tensors().size()) {
      return error(
          ErrorCode::kInvalidInput,
          "{}: its headers name {} tensors, but the checkpoint has {}; delete the folder to restore in a new layout",
          folder, tensors, source_.tensors().size());
    }
    return files;
  }

  Status match(OriginalFile& file, const std::string& path) const {
    NFP_ASSIGN_OR_RETURN(const SafetensorsHeader header, parse_safetensors_header(file.header, INT64_MAX / 2, path));
    for (const SafetensorsEntry& entry : header.tensors) {
      const TensorInfo* tensor = source_.find(entry.name);
      const uint64_t begin = sizeof(uint64_t) + file.header.size() + file.data_bytes;
      if (tensor == nullptr || tensor->dtype != entry.dtype || tensor->shape != entry.shape || entry.begin != begin) {
        return error(ErrorCode::kInvalidInput,
                     "{}: tensor '{}' is not as in the checkpoint; delete the folder to restore in a new layout", path,
                     entry.name);
      }
      file.tensors.push_back(tensor);
      file.data_bytes += entry.end - entry.begin;
    }
    return ok_status();
  }

  Status write_anew(const OutputDirectory& out, ProgressCounter& progress) {
    std::vector<const TensorInfo*> tensors;
    for (const TensorInfo& tensor : source_.tensors()) tensors.push_back(&tensor);
    std::stable_sort(tensors.begin(), tensors.end(),
                     [](const TensorInfo* a, const TensorInfo* b) { return size_of(a->dtype) > size_of(b->dtype); });
    std::vector<uint64_t> sizes;
    for (const TensorInfo* tensor : tensors) sizes.push_back(tensor->bytes());
    const std::vector<size_t> firsts = partition_shards(sizes, options_.shard_bytes);
    const size_t shards = firsts.size() - 1;
    std::map<std::string, std::string> weight_map;
    for (size_t s = 0; s < shards; ++s) {
      const auto part = std::span(tensors).subspan(firsts[s], firsts[s + 1] - firsts[s]);
      std::vector<SafetensorsItem> items;
      for (const TensorInfo* tensor : part) {
        items.push_back({tensor->name, tensor->dtype, tensor->shape});
        weight_map[tensor->name] = shard_file("model", s, shards);
        report_.bytes += tensor->bytes();
      }
      NFP_ASSIGN_OR_RETURN(
          auto writer, SafetensorsWriter::create(out.file(shard_file("model", s, shards)), items, {{"format", "pt"}}));
      for (const TensorInfo* tensor : part) {
        NFP_RETURN_IF_ERROR(copy_tensor(source_, *tensor, writer, threads_, progress));
      }
      NFP_RETURN_IF_ERROR(writer.finish());
    }
    return shards == 1 ? ok_status() : write_index(out.file(kModelIndex), weight_map, report_.bytes);
  }

  const ModelSource& source_;
  const RestoreOptions& options_;
  ThreadPool& threads_;
  RestoreReport report_;
};

}  // namespace

Result<RestoreReport> restore(const ModelSource& source, const std::string& dst, const RestoreOptions& options,
                              ThreadPool& threads) {
  return Restorer(source, options, threads).run(dst);
}

}  // namespace nfp
