#include "io/checkpoint_writer.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <utility>

#include "base/atomic_file.h"
#include "base/mapped_file.h"
#include "io/json_object.h"
#include "io/nested_layout.h"

namespace nfp {

namespace fs = std::filesystem;

namespace {

// Index of the first element that is NaN or infinity; -1 when all are finite.
int64_t first_not_finite(std::span<const std::byte> bytes, DType dtype) {
  const auto scan = [&]<typename Bits>(Bits exponent) {
    for (size_t i = 0; i < bytes.size() / sizeof(Bits); ++i) {
      Bits bits;
      std::memcpy(&bits, bytes.data() + i * sizeof(Bits), sizeof(Bits));
      if ((bits & exponent) == exponent) return static_cast<int64_t>(i);
    }
    return int64_t{-1};
  };
  if (dtype == DType::kF16) return scan(uint16_t{0x7c00});
  if (dtype == DType::kBF16) return scan(uint16_t{0x7f80});
  if (dtype == DType::kF32) return scan(uint32_t{0x7f800000});
  return -1;
}

}  // namespace

std::string shard_file(std::string_view stem, size_t shard, size_t shards) {
  if (shards == 1) return fmt::format("{}.safetensors", stem);
  return fmt::format("{}-{:05}-of-{:05}.safetensors", stem, shard + 1, shards);
}

std::vector<size_t> partition_shards(std::span<const uint64_t> sizes, uint64_t limit) {
  std::vector<size_t> firsts = {0};
  uint64_t bytes = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (i > firsts.back() && bytes + sizes[i] > limit) {
      firsts.push_back(i);
      bytes = 0;
    }
    bytes += sizes[i];
  }
  firsts.push_back(sizes.size());
  return firsts;
}

Status copy_tensor(const ModelSource& source, const TensorInfo& tensor, SafetensorsWriter& writer, ThreadPool& threads,
                   ProgressCounter& progress) {
  const auto row_bytes = static_cast<int64_t>(static_cast<uint64_t>(tensor.row_elements()) * size_of(tensor.dtype));
  const int64_t rows = row_bytes == 0 ? 0 : tensor.rows();
  const int64_t chunk =
      std::clamp<int64_t>(kCopyBytes / std::max<int64_t>(row_bytes, 1), 1, std::max<int64_t>(rows, 1));
  std::vector<std::byte> buffer(static_cast<size_t>(rows == 0 ? 0 : chunk * row_bytes));
  for (int64_t first = 0; first < rows; first += chunk) {
    const int64_t count = std::min(chunk, rows - first);
    Status read = for_rows(threads, count, [&](int64_t from, int64_t n) -> Status {
      std::byte* out = buffer.data() + from * row_bytes;
      NFP_RETURN_IF_ERROR(source.read_rows(tensor, first + from, n, out));
      const int64_t bad = first_not_finite({out, static_cast<size_t>(n * row_bytes)}, tensor.dtype);
      if (bad < 0) return ok_status();
      return error(ErrorCode::kInvalidInput,
                   "{}: tensor '{}' holds NaN or infinity in row {}; the checkpoint is damaged", source.path(),
                   tensor.name, first + from + bad / std::max<int64_t>(1, tensor.row_elements()));
    });
    NFP_RETURN_IF_ERROR(read);
    NFP_RETURN_IF_ERROR(writer.write({buffer.data(), static_cast<size_t>(count * row_bytes)}));
  }
  source.release(tensor);
  progress.add(tensor.file_bytes);
  return ok_status();
}

Status write_index(const std::string& path, const std::map<std::string, std::string>& weight_map, uint64_t total_size) {
  nlohmann::ordered_json json;
  json["metadata"] = {{"total_size", total_size}};
  json["weight_map"] = weight_map;
  return write_file(path, to_text(json));
}

Status copy_side_files(const ModelSource& source, const OutputDirectory& out) {
  if (const std::string gguf = source.tokenizer_gguf(); !gguf.empty()) {
    NFP_RETURN_IF_ERROR(write_file(out.file(kTokenizerGguf), gguf));
  }
  if (source.kind() == SourceKind::kGguf) return ok_status();
  constexpr std::array<std::string_view, 6> kExtensions = {".json", ".txt", ".model", ".jinja", ".tiktoken", ".md"};
  std::error_code code;
  fs::directory_iterator place(source.path(), code), end;
  for (; !code && place != end; place.increment(code)) {
    const std::string name = place->path().filename().string();
    const std::string extension = place->path().extension().string();
    std::error_code unreadable;
    const bool wanted = std::find(kExtensions.begin(), kExtensions.end(), extension) != kExtensions.end() ||
                        name == kTokenizerGguf || name.starts_with("LICENSE") || name.starts_with("NOTICE");
    if (!wanted || name == "config.json" || name.ends_with(".index.json") || !place->is_regular_file(unreadable)) {
      continue;
    }
    NFP_ASSIGN_OR_RETURN(const std::string text, read_text_file(place->path().string()));
    NFP_RETURN_IF_ERROR(write_file(out.file(name), text));
  }
  if (code) return error(ErrorCode::kIo, "{}: cannot be listed: {}", source.path(), code.message());
  return ok_status();
}

}  // namespace nfp
