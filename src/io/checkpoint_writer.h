// What convert and restore share: copying tensors by chunks, small files, indexes, progress.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/progress.h"
#include "base/result.h"
#include "base/thread_pool.h"
#include "io/model_source.h"
#include "io/output_directory.h"
#include "io/safetensors_writer.h"

namespace nfp {

inline constexpr int64_t kCopyBytes = int64_t{16} << 20;  // held at once

// Counts bytes for a ProgressCallback.
class ProgressCounter {
 public:
  ProgressCounter(const ProgressCallback& callback, std::string_view what, uint64_t total)
      : callback_(callback), progress_{what, 0, total} {}
  void add(uint64_t bytes) {
    progress_.done = std::min(progress_.total, progress_.done + bytes);
    if (callback_) callback_(progress_);
  }

 private:
  const ProgressCallback& callback_;
  Progress progress_;
};

// "model-00002-of-00003.safetensors"; "model.safetensors" for the only one.
std::string shard_file(std::string_view stem, size_t shard, size_t shards);

// Consecutive parts of 0..sizes.size()-1, each of at most `limit` bytes or one element; as first indices, with the end.
std::vector<size_t> partition_shards(std::span<const uint64_t> sizes, uint64_t limit);

// Appends the whole tensor in its own dtype. Error: NaN or infinity in a float tensor.
Status copy_tensor(const ModelSource& source, const TensorInfo& tensor, SafetensorsWriter& writer, ThreadPool& threads,
                   ProgressCounter& progress);

// Calls fn(first, count) -> Status for parts of 0..rows-1 on all threads; the first row's error wins.
template <typename F>
Status for_rows(ThreadPool& threads, int64_t rows, F&& fn) {
  std::mutex mutex;
  int64_t failed = -1;
  Status status;
  threads.parallel_for(rows, 1, [&](Range range) {
    Status mine = fn(range.begin, range.size());
    if (mine.ok()) return;
    const std::lock_guard lock(mutex);
    if (failed < 0 || range.begin < failed) {
      failed = range.begin;
      status = std::move(mine);
    }
  });
  return status;
}

// tensor -> file, as model.safetensors.index.json has it.
Status write_index(const std::string& path, const std::map<std::string, std::string>& weight_map, uint64_t total_size);

// Tokenizer, generation settings, licence: the small files of a model's directory, its tokenizer.gguf included.
Status copy_side_files(const ModelSource& source, const OutputDirectory& out);

}  // namespace nfp
