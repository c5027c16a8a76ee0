#include "io/safetensors_writer.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <utility>

#include "base/atomic_file.h"

namespace nfp {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kMetadata = "__metadata__";
constexpr uint64_t kBlockBytes = 8u << 20;  // read and written at once

std::vector<std::span<const TensorSource>> into_shards(const std::vector<TensorSource>& tensors, uint64_t most) {
  std::vector<std::span<const TensorSource>> shards;
  size_t first = 0;
  uint64_t bytes = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (i > first && bytes + tensors[i].bytes() > most) {
      shards.push_back(std::span(tensors).subspan(first, i - first));
      first = i;
      bytes = 0;
    }
    bytes += tensors[i].bytes();
  }
  shards.push_back(std::span(tensors).subspan(first));
  return shards;
}

// Wider dtypes first, as the reference implementation writes them: every tensor is aligned to its elements.
std::vector<const TensorSource*> in_file_order(std::span<const TensorSource> shard) {
  std::vector<const TensorSource*> order;
  for (const TensorSource& tensor : shard) order.push_back(&tensor);
  std::stable_sort(order.begin(), order.end(),
                   [](const TensorSource* a, const TensorSource* b) { return size_of(a->dtype) > size_of(b->dtype); });
  return order;
}

std::string header_of(std::span<const TensorSource* const> tensors) {
  // Appended, here and below: by [] each name would be looked up among those before it.
  Json header = Json::object();
  auto& entries = header.get_ref<Json::object_t&>();
  entries.emplace_back(kMetadata, Json{{"format", "pt"}});
  uint64_t offset = 0;
  for (const TensorSource* tensor : tensors) {
    const uint64_t end = offset + tensor->bytes();
    entries.emplace_back(tensor->name, Json{{"dtype", info(tensor->dtype).safetensors_name},
                                            {"shape", std::vector<int64_t>(tensor->shape.begin(), tensor->shape.end())},
                                            {"data_offsets", {offset, end}}});
    offset = end;
  }
  std::string text = header.dump(-1, ' ', false, Json::error_handler_t::replace);
  text.resize((text.size() + 7) / 8 * 8, ' ');  // the data starts aligned
  return text;
}

Status write_tensor(const TensorSource& tensor, AtomicFile& file, const ShardOptions& options, ThreadPool& threads,
                    std::vector<std::byte>& block) {
  const uint64_t row = tensor.row_bytes();
  if (row == 0) return ok_status();
  const auto at_once = static_cast<int64_t>(std::max<uint64_t>(1, kBlockBytes / row));
  for (int64_t first = 0; first < tensor.rows(); first += at_once) {
    const int64_t count = std::min(at_once, tensor.rows() - first);
    block.resize(static_cast<size_t>(count) * row);
    std::mutex mutex;
    std::optional<Error> failure;
    threads.parallel_for(count, 1, [&](Range range) {
      Status status =
          tensor.read(first + range.begin, range.size(), block.data() + static_cast<size_t>(range.begin) * row);
      if (status.ok()) return;
      const std::lock_guard lock(mutex);
      if (!failure) failure = std::move(status).error();
    });
    if (failure) return *std::move(failure);
    NFP_RETURN_IF_ERROR(file.write(std::span<const std::byte>(block)));
    if (options.written) options.written(block.size());
  }
  if (tensor.done) tensor.done();
  return ok_status();
}

}  // namespace

Status write_safetensors(const std::string& directory, const std::vector<TensorSource>& tensors,
                         const ShardOptions& options, ThreadPool& threads) {
  std::set<std::string_view> names = {kMetadata};
  for (const TensorSource& tensor : tensors) {
    if (!names.insert(tensor.name).second) {
      return error(ErrorCode::kInvalidInput, "{}: tensor '{}' would be written twice", directory, tensor.name);
    }
  }
  const auto shards = into_shards(tensors, options.shard_bytes);
  const bool single = options.single_name && shards.size() == 1;
  Json weight_map = Json::object();
  auto& places = weight_map.get_ref<Json::object_t&>();
  uint64_t total = 0;
  std::vector<std::byte> block;
  for (size_t s = 0; s < shards.size(); ++s) {
    const std::string name = single
                                 ? options.prefix + ".safetensors"
                                 : fmt::format("{}-{:05}-of-{:05}.safetensors", options.prefix, s + 1, shards.size());
    NFP_ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::create(fmt::format("{}/{}", directory, name)));
    const std::vector<const TensorSource*> order = in_file_order(shards[s]);
    const std::string header = header_of(order);
    const uint64_t length = header.size();
    NFP_RETURN_IF_ERROR(file.write(std::as_bytes(std::span(&length, 1))));
    NFP_RETURN_IF_ERROR(file.write(header));
    for (const TensorSource* tensor : order) {
      NFP_RETURN_IF_ERROR(write_tensor(*tensor, file, options, threads, block));
      places.emplace_back(tensor->name, name);
      total += tensor->bytes();
    }
    NFP_RETURN_IF_ERROR(file.commit());
  }
  if (single) return ok_status();
  const Json index = {{"metadata", {{"total_size", total}}}, {"weight_map", std::move(weight_map)}};
  return write_file(directory + "/" + options.prefix + ".safetensors.index.json",
                    index.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
}

}  // namespace nfp
