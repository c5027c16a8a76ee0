#include "calibrate/store.h"

#include <nlohmann/json.hpp>

#include <cstdlib>
#include <filesystem>
#include <limits>
#include <set>

#include "base/atomic_file.h"
#include "base/json_depth.h"
#include "base/log.h"
#include "base/mapped_file.h"
#include "calibrate/smoothing.h"

namespace nfp {
namespace {

uint64_t hash_text(std::string_view text, uint64_t hash) { return hash_bytes(std::as_bytes(std::span(text)), hash); }

}  // namespace

Result<std::string> user_cache_folder() {
  if (const char* folder = std::getenv("XDG_CACHE_HOME"); folder != nullptr && *folder != '\0') {
    return std::string(folder) + "/nestedfp";
  }
  if (const char* home = std::getenv("HOME"); home != nullptr && *home != '\0') {
    return std::string(home) + "/.cache/nestedfp";
  }
  return error(ErrorCode::kIo, "no folder for the cache: set XDG_CACHE_HOME or HOME");
}

Result<uint64_t> content_key(const ModelSource& source) {
  uint64_t hash = hash_text(source.config_json(), kHashStart);
  std::vector<std::byte> row;
  for (const TensorInfo& tensor : source.tensors()) {
    hash = hash_text(tensor.name, hash);
    hash = hash_text(name_of(tensor.dtype), hash);
    for (size_t i = 0; i < tensor.shape.rank(); ++i) hash = hash_text(std::to_string(tensor.shape[i]) + ",", hash);
    if (tensor.rows() < 1) continue;
    row.resize(static_cast<size_t>(tensor.row_elements()) * size_of(tensor.dtype));
    for (int64_t at : std::set<int64_t>{0, tensor.rows() / 2, tensor.rows() - 1}) {
      NFP_RETURN_IF_ERROR(source.read_rows(tensor, at, 1, row.data()));
      hash = hash_bytes(row, hash);
    }
  }
  return hash;
}

Result<CalibrationStore> CalibrationStore::open(const std::string& cache_folder, uint64_t key) {
  CalibrationStore store;
  store.folder_ = fmt::format("{}/calibration/{:016x}", cache_folder, key);
  store.key_ = key;
  return store;
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
    log::warn("{}", choices.error().message);
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
