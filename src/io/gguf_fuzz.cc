// A GGUF file from its bytes to rows of weights.
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "io/model_source.h"
#include "io/testing/small_files.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const int fd = ::memfd_create("model.gguf", MFD_CLOEXEC);
  if (::ftruncate(fd, 0) != 0 || ::pwrite(fd, data, size, 0) != static_cast<ssize_t>(size)) return 0;
  auto source = nfp::ModelSource::open("/proc/self/fd/" + std::to_string(fd));
  if (!source.ok()) return 0;
  for (const nfp::TensorInfo& tensor : (*source)->tensors()) {
    if (tensor.bytes() > (1u << 20)) continue;
    std::vector<std::byte> bytes(tensor.bytes());
    (void)(*source)->read_rows(tensor, 0, tensor.rows(), bytes.data());
    std::vector<float> values(static_cast<size_t>(tensor.shape.elements()));
    (void)(*source)->read_f32(tensor.name, values);
  }
  (void)(*source)->tokenizer_gguf();
  return 0;
}

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

// Starts from a whole model: no mutation of nothing would get past the header.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned int) {
  static const std::string seed = nfp::testing::tiny_gguf();
  if (size >= 24 || max_size < seed.size()) return LLVMFuzzerMutate(data, size, max_size);
  std::memcpy(data, seed.data(), seed.size());
  return seed.size();
}
