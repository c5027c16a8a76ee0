// Errors across the C boundary: a code, and a message for the calling thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <new>
#include <optional>
#include <string_view>
#include <type_traits>

#include "base/result.h"
#include "nestedfp.h"

namespace nfp::capi {

nfp_status fail(nfp_status code, std::string_view message);
inline nfp_status fail(const Error& error) {
  return fail(static_cast<nfp_status>(static_cast<int>(error.code) + 1), error.message);
}
inline nfp_status done(const Status& status) { return status.ok() ? NFP_OK : fail(status.error()); }

// Runs a body that returns nfp_status; nothing is thrown across the boundary.
template <typename F>
nfp_status guarded(F&& body) noexcept {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return fail(NFP_RESOURCE, "out of memory");
  } catch (const std::exception& e) {
    return fail(NFP_INTERNAL, e.what());
  } catch (...) {
    return fail(NFP_INTERNAL, "unknown exception");
  }
}

// A struct of the caller that is at least as long as ours of today.
template <typename T>
bool complete(const T* value) {
  return value != nullptr && value->size >= sizeof(T);
}

// A struct of the caller that may end before the fields that were added since its first `least` bytes: these are then
// zero.
template <typename T>
std::optional<T> completed(const T* value, size_t least) {
  static_assert(std::is_trivially_copyable_v<T>);
  if (value == nullptr || value->size < least) return std::nullopt;
  T whole{};
  std::memcpy(&whole, value, std::min(value->size, sizeof(T)));
  return whole;
}

// Whether a caller's enumerator is one of 0 .. count - 1. C lets it be any number, C++ does not: its bytes are looked
// at.
template <typename E>
bool is_one_of(const E& value, uint32_t count) {
  uint32_t number = 0;
  static_assert(sizeof(number) == sizeof(value));
  std::memcpy(&number, &value, sizeof(number));
  return number < count;
}

}  // namespace nfp::capi

#define NFP_CAPI_REQUIRE(condition, ...) \
  if (!(condition)) return ::nfp::capi::fail(::nfp::error(::nfp::ErrorCode::kUsage, __VA_ARGS__))
