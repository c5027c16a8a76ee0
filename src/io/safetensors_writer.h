// Writes a safetensors file as a stream: the header first, from the tensors' shapes, then their bytes in order. Nothing
// but the header is held. The file appears under its name when it is whole.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/atomic_file.h"
#include "base/dtype.h"
#include "base/result.h"
#include "base/tensor_view.h"

namespace nfp {

struct SafetensorsItem {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;

  uint64_t bytes() const { return static_cast<uint64_t>(shape.elements()) * size_of(dtype); }
};

class SafetensorsWriter {
 public:
  // The data follows in the order of `items`. Tensors of wider dtypes should come first, so that all are aligned.
  static Result<SafetensorsWriter> create(const std::string& path, std::span<const SafetensorsItem> items,
                                          const std::map<std::string, std::string>& metadata);
  // With a header that exists already (the JSON text, padding included), for `data_bytes` of data.
  static Result<SafetensorsWriter> create_with_header(const std::string& path, std::string_view header,
                                                      uint64_t data_bytes);

  // The next bytes.
  Status write(std::span<const std::byte> bytes);
  // Checks that all bytes came, and makes the file appear.
  Status finish();

 private:
  explicit SafetensorsWriter(AtomicFile file) : file_(std::move(file)) {}
  AtomicFile file_;
  std::string path_;
  uint64_t left_ = 0;
};

}  // namespace nfp
