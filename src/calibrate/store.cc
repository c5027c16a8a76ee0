#include "calibrate/store.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <filesystem>
#include <limits>
#include <mutex>
#include <utility>

#include "base/atomic_file.h"
#include "base/json_depth.h"
#include "base/log.h"
#include "base/mapped_file.h"
#include "calibrate/smoothing.h"

namespace nfp {
namespace {

uint64_t hash_text(std::string_view text, uint64_t hash) { return hash_bytes(std::as_bytes(std::span(text)), hash); }

std::string all_in(const std::string& cache_folder) { return cache_folder + "/calibration"; }

constexpr int64_t kPieceBytes = 1 << 20;  // read and hashed at a time

// Four chains of 64-bit words, many times as fast as one of bytes. Each step maps hashes one to one, and turns them, as
// a product carries differences upwards only.
uint64_t hash_piece(std::span<const std::byte> bytes) {
  std::array<uint64_t, 4> chains = {kHashStart, ~kHashStart, kHashStart << 1, kHashStart >> 1};
  std::array<uint64_t, 4> words;
  for (size_t at = 0; at < bytes.size(); at += sizeof(words)) {
    words = {};
    std::memcpy(words.data(), bytes.data() + at, std::min(sizeof(words), bytes.size() - at));
    for (size_t i = 0; i < chains.size(); ++i) {
      chains[i] = std::rotl((chains[i] ^ words[i]) * 0x9e3779b97f4a7c15ull, 29);
    }
  }
  return hash_bytes(std::as_bytes(std::span(chains)));
}

Result<std::vector<uint64_t>> hash_pieces(const ModelSource& source, const TensorInfo& tensor, ThreadPool& threads) {
  const int64_t row_bytes = tensor.row_elements() * static_cast<int64_t>(size_of(tensor.dtype));
  const int64_t rows = std::max<int64_t>(1, kPieceBytes / std::max<int64_t>(1, row_bytes));
  std::vector<uint64_t> hashes(static_cast<size_t>((tensor.rows() + rows - 1) / rows));
  std::mutex mutex;
  Status failure;
  threads.parallel_for(std::ssize(hashes), 1, [&](Range range) {
    std::vector<std::byte> bytes;
    Status status;
    for (int64_t piece = range.begin; piece < range.end && status.ok(); ++piece) {
      const int64_t first = piece * rows, count = std::min(rows, tensor.rows() - first);
      bytes.resize(static_cast<size_t>(count * row_bytes));
      status = source.read_rows(tensor, first, count, bytes.data());
      hashes[static_cast<size_t>(piece)] = hash_piece(bytes);
    }
    const std::lock_guard lock(mutex);
    if (!status.ok()) failure = std::move(status);
  });
  NFP_RETURN_IF_ERROR(failure);
  return hashes;
}

}  // namespace

Result<uint64_t> content_key(const ModelSource& source, ThreadPool& threads, const ProgressCallback& progress) {
  uint64_t total = 0, done = 0;
  for (const TensorInfo& tensor : source.tensors()) total += tensor.bytes();
  uint64_t hash = hash_text(source.config_json(), kHashStart);
  for (const TensorInfo& tensor : source.tensors()) {
    hash = hash_text(tensor.name, hash);
    hash = hash_text(name_of(tensor.dtype), hash);
    for (size_t i = 0; i < tensor.shape.rank(); ++i) hash = hash_text(std::to_string(tensor.shape[i]) + ",", hash);
    NFP_ASSIGN_OR_RETURN(const std::vector<uint64_t> pieces, hash_pieces(source, tensor, threads));
    hash = hash_bytes(std::as_bytes(std::span(pieces)), hash);
    source.release(tensor);
    done += tensor.bytes();
    if (progress) progress({"looking for a calibration", done, total});
  }
  return hash;
}

Result<CalibrationStore> CalibrationStore::open(const std::string& cache_folder, uint64_t key) {
  CalibrationStore store;
  store.folder_ = fmt::format("{}/{:016x}", all_in(cache_folder), key);
  store.key_ = key;
  return store;
}

bool CalibrationStore::any(const std::string& cache_folder) {
  std::error_code code;
  return !std::filesystem::is_empty(all_in(cache_folder), code) && !code;
}

std::string CalibrationStore::layer_path(int32_t index) const {
  return fmt::format("{}/layer-{:04}.bin", folder_, index);
}

Status CalibrationStore::make_folder() const {
  std::error_code failed;
  std::filesystem::create_directories(folder_, failed);
  if (failed) return error(ErrorCode::kIo, "{}: cannot be made: {}", folder_, failed.message());
  return ok_status();
}

std::optional<std::vector<UpperChoice>> CalibrationStore::layer(int32_t index) const {
  const std::string path = layer_path(index);
  const auto file = MappedFile::open(path);
  if (!file.ok()) return std::nullopt;
  auto choices = parse_choices(file->bytes(), path, key_);
  if (!choices.ok()) {
    log::warn("{}; the layer is calibrated again", choices.error().message);
    return std::nullopt;
  }
  return std::move(*choices);
}

Status CalibrationStore::save_layer(int32_t index, std::span<const UpperChoice> choices) const {
  NFP_RETURN_IF_ERROR(make_folder());
  return write_choices(layer_path(index), key_, choices);
}

std::optional<TokenSequences> CalibrationStore::text() const {
  const auto file = read_text_file(folder_ + "/text.json");
  if (!file.ok()) return std::nullopt;
  const auto json = parse_file_json<nlohmann::json>(*file);
  if (!json.is_array()) return std::nullopt;
  TokenSequences text;
  for (const auto& sequence : json) {
    if (!sequence.is_array()) return std::nullopt;
    auto& tokens = text.emplace_back();
    for (const auto& token : sequence) {
      if (!token.is_number_integer()) return std::nullopt;
      const auto number = token.get<int64_t>();
      if (number < 0 || number > std::numeric_limits<int32_t>::max()) return std::nullopt;
      tokens.push_back(static_cast<int32_t>(number));
    }
  }
  return text;
}

Status CalibrationStore::save_text(const TokenSequences& text) const {
  NFP_RETURN_IF_ERROR(make_folder());
  // It may be the text of a file that only this user may read.
  return write_file(folder_ + "/text.json", nlohmann::json(text).dump(), 0600);
}

std::optional<std::vector<Sensitivity>> CalibrationStore::sensitivities() const {
  const std::string path = folder_ + "/order.json";
  const auto file = read_text_file(path);
  if (!file.ok()) return std::nullopt;
  auto order = sensitivity_from_json(*file, path);
  if (!order.ok() || order->empty()) return std::nullopt;
  return std::move(*order);
}

Status CalibrationStore::save_sensitivity(std::span<const Sensitivity> order) const {
  NFP_RETURN_IF_ERROR(make_folder());
  return write_file(folder_ + "/order.json", sensitivity_to_json(order));
}

std::optional<TensorScalings> CalibrationStore::smoothing() const {
  const std::string path = folder_ + "/smoothing.json";
  const auto file = read_text_file(path);
  if (!file.ok()) return std::nullopt;
  auto scalings = scalings_from_json(*file, path);
  if (!scalings.ok()) {
    log::warn("{}", scalings.error().message);
    return std::nullopt;
  }
  return std::move(*scalings);
}

Status CalibrationStore::save_smoothing(const TensorScalings& scalings) const {
  NFP_RETURN_IF_ERROR(make_folder());
  return write_file(folder_ + "/smoothing.json", scalings_to_json(scalings));
}

}  // namespace nfp
