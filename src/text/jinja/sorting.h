// A stable merge sort that stays within its data whatever the comparison answers: a template's values may be ordered
// inconsistently (NaN) and comparing them may throw, for which the standard library's sorts promise nothing.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace nfp::jinja {

template <typename T, typename Less>
void stable_merge_sort(std::vector<T>& items, const Less& less) {
  std::vector<T> merged(items.size());
  for (size_t width = 1; width < items.size(); width *= 2) {
    for (size_t begin = 0; begin < items.size(); begin += 2 * width) {
      const size_t middle = begin + width < items.size() ? begin + width : items.size();
      const size_t end = begin + 2 * width < items.size() ? begin + 2 * width : items.size();
      size_t left = begin, right = middle, out = begin;
      while (left < middle && right < end) {
        if (less(items[right], items[left])) {
          merged[out++] = items[right++];
        } else {
          merged[out++] = items[left++];
        }
      }
      while (left < middle) merged[out++] = items[left++];
      while (right < end) merged[out++] = items[right++];
    }
    std::swap(items, merged);
  }
}

}  // namespace nfp::jinja
