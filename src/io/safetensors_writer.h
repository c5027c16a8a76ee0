// Writes tensors into one or more safetensors files with their index, streaming: memory holds a few rows at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/result.h"
#include "base/shape.h"
#include "base/thread_pool.h"

namespace nfp {

// A tensor to be written, given by slices of its outermost dimension.
struct TensorSource {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  // Thread-safe. out: `count` rows of row_bytes().
  std::function<Status(int64_t first, int64_t count, std::byte* out)> read;
  std::function<void()> done;  // after the last read; may be empty

  int64_t rows() const { return shape.rank() == 0 ? 1 : shape[0]; }
  uint64_t bytes() const { return static_cast<uint64_t>(shape.elements()) * size_of(dtype); }
  uint64_t row_bytes() const { return rows() == 0 ? 0 : bytes() / static_cast<uint64_t>(rows()); }
};

struct ShardOptions {
  std::string prefix = "model";          // PREFIX-00001-of-00002.safetensors, PREFIX.safetensors.index.json
  uint64_t shard_bytes = 5'000'000'000;  // a file is closed before it would grow over this
  bool single_name = false;              // one file only: PREFIX.safetensors and no index, as Hugging Face writes it
  std::function<void(uint64_t bytes)> written;  // progress; may be empty
};

// Writes into `directory`, which exists.
Status write_safetensors(const std::string& directory, const std::vector<TensorSource>& tensors,
                         const ShardOptions& options, ThreadPool& threads);

}  // namespace nfp
