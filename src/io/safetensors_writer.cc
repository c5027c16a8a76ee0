#include "io/safetensors_writer.h"

#include <nlohmann/json.hpp>

#include <cstring>
#include <utility>

namespace nfp {

Result<SafetensorsWriter> SafetensorsWriter::create(const std::string& path, std::span<const SafetensorsItem> items,
                                                    const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  uint64_t at = 0;
  for (const SafetensorsItem& item : items) {
    const uint64_t end = at + item.bytes();
    header[item.name] = {{"dtype", info(item.dtype).safetensors_name},
                         {"shape", std::vector<int64_t>(item.shape.begin(), item.shape.end())},
                         {"data_offsets", {at, end}}};
    at = end;
  }
  std::string text = header.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  text.resize((text.size() + 7) / 8 * 8, ' ');  // the data begins at a multiple of 8
  return create_with_header(path, text, at);
}

Result<SafetensorsWriter> SafetensorsWriter::create_with_header(const std::string& path, std::string_view header,
                                                                uint64_t data_bytes) {
  NFP_ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::create(path));
  const uint64_t length = header.size();
  NFP_RETURN_IF_ERROR(file.write(std::as_bytes(std::span(&length, 1))));
  NFP_RETURN_IF_ERROR(file.write(header));
  SafetensorsWriter writer(std::move(file));
  writer.path_ = path;
  writer.left_ = data_bytes;
  return writer;
}

Status SafetensorsWriter::write(std::span<const std::byte> bytes) {
  if (bytes.size() > left_) {
    return error(ErrorCode::kIo, "{}: {} bytes more than its header announces", path_, bytes.size() - left_);
  }
  left_ -= bytes.size();
  return file_.write(bytes);
}

Status SafetensorsWriter::finish() {
  if (left_ != 0) return error(ErrorCode::kIo, "{}: {} bytes fewer than its header announces", path_, left_);
  return file_.commit();
}

}  // namespace nfp
