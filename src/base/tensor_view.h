// A tensor in host memory that somebody else owns: pointer, shape, dtype. Always dense and row-major.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>

#include "base/dtype.h"

namespace nfp {

// Dimensions, outermost first. At most kMaxRank; every constructor's caller has checked sizes before.
class Shape {
 public:
  static constexpr size_t kMaxRank = 8;

  Shape() = default;
  Shape(std::initializer_list<int64_t> dims) {
    for (int64_t d : dims) push_back(d);
  }
  void push_back(int64_t dim) {
    if (rank_ < kMaxRank) dims_[rank_++] = dim;
  }
  size_t rank() const { return rank_; }
  int64_t operator[](size_t i) const { return dims_[i]; }
  int64_t elements() const {
    int64_t count = 1;
    for (size_t i = 0; i < rank_; ++i) count *= dims_[i];
    return count;
  }
  const int64_t* begin() const { return dims_.data(); }
  const int64_t* end() const { return dims_.data() + rank_; }
  friend bool operator==(const Shape& a, const Shape& b) {
    if (a.rank_ != b.rank_) return false;
    for (size_t i = 0; i < a.rank_; ++i) {
      if (a.dims_[i] != b.dims_[i]) return false;
    }
    return true;
  }

 private:
  std::array<int64_t, kMaxRank> dims_{};
  size_t rank_ = 0;
};

struct TensorView {
  const std::byte* data = nullptr;
  DType dtype = DType::kF32;
  Shape shape;

  size_t bytes() const { return static_cast<size_t>(shape.elements()) * size_of(dtype); }
  // The caller has checked dtype; data need not be aligned in a file, so copy out of unaligned ones.
  template <typename T>
  const T* as() const {
    return reinterpret_cast<const T*>(data);
  }
  std::span<const std::byte> span() const { return {data, bytes()}; }
};

}  // namespace nfp
