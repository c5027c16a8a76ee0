// The dimensions of a tensor. Tensors are dense and row-major wherever one is named.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

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
  friend bool operator==(const Shape&, const Shape&) = default;  // dims_ beyond rank_ are 0

 private:
  std::array<int64_t, kMaxRank> dims_{};
  size_t rank_ = 0;
};

}  // namespace nfp
