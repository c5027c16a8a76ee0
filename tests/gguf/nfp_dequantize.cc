// nfp_dequantize TYPE < blocks > floats: dequantises GGUF blocks, for gguf/oracle.py.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "io/dequantize.h"

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const nfp::GgmlTypeInfo* info = nfp::find_ggml_type(static_cast<uint32_t>(std::strtoul(argv[1], nullptr, 10)));
  if (info == nullptr) return 1;
  std::string blocks;
  char buffer[1 << 16];
  for (size_t got = 0; (got = std::fread(buffer, 1, sizeof(buffer), stdin)) > 0;) blocks.append(buffer, got);
  const auto count = static_cast<int64_t>(blocks.size()) / info->bytes;
  std::vector<float> values(static_cast<size_t>(count * info->block));
  info->dequantize(reinterpret_cast<const std::byte*>(blocks.data()), count, values.data());
  return std::fwrite(values.data(), sizeof(float), values.size(), stdout) == values.size() ? 0 : 1;
}
