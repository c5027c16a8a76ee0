#include "backend/cpu/huge_pages.h"

#include <sys/mman.h>

#include <cstdint>
#include <utility>

namespace nfp::cpu {
namespace {
constexpr size_t kPage = 4096;
}

Result<Mapping> Mapping::create(size_t bytes, bool reserve_only) {
  if (bytes == 0) bytes = 1;
  if (bytes > SIZE_MAX / 2) return error(ErrorCode::kResource, "cannot allocate {} bytes of memory", bytes);
  const size_t align = bytes >= kHugePage && !reserve_only ? kHugePage : kPage;
  const size_t size = (bytes + align - 1) / align * align;
  const size_t slack = align - kPage;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | (reserve_only ? MAP_NORESERVE : 0);
  void* mapped = mmap(nullptr, size + slack, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (mapped == MAP_FAILED) {
    return error(ErrorCode::kResource, "cannot allocate {:.1f} MB of memory; use a smaller model, context or batch",
                 static_cast<double>(bytes) / 1e6);
  }
  auto* begin = static_cast<char*>(mapped);
  const size_t before = (align - reinterpret_cast<uintptr_t>(begin) % align) % align;
  if (before > 0) munmap(begin, before);
  if (slack > before) munmap(begin + before + size, slack - before);
  Mapping mapping;
  mapping.data_ = begin + before;
  mapping.bytes_ = bytes;
  mapping.mapped_ = size;
#ifdef MADV_HUGEPAGE
  if (align == kHugePage) (void)madvise(mapping.data_, size, MADV_HUGEPAGE);  // a refusal costs speed only
#endif
  return mapping;
}

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, mapped_);
}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(mapped_, other.mapped_);
  return *this;
}

Result<Arena::Piece> Arena::allocate(size_t bytes) {
  if (bytes > kChunk / 2) {
    NFP_ASSIGN_OR_RETURN(Mapping mapping, Mapping::create(bytes));
    auto owner = std::make_shared<Mapping>(std::move(mapping));
    return Piece{owner->data(), owner};
  }
  const size_t rounded = (bytes + kPage - 1) / kPage * kPage;
  const std::lock_guard lock(mutex_);
  if (chunk_ == nullptr || chunk_->bytes() - used_ < rounded) {
    NFP_ASSIGN_OR_RETURN(Mapping mapping, Mapping::create(kChunk));
    chunk_ = std::make_shared<Mapping>(std::move(mapping));
    used_ = 0;
  }
  Piece piece{static_cast<char*>(chunk_->data()) + used_, chunk_};
  used_ += rounded;
  return piece;
}

}  // namespace nfp::cpu
