// Errors are values. A function that can fail on outside input returns Result<T> (or Status when there is
// nothing to return); no exception crosses a folder's boundary.
//
//   Result<Config> parse(std::string_view text);
//   ...
//   NFP_ASSIGN_OR_RETURN(Config config, parse(text));
//   NFP_RETURN_IF_ERROR(check(config));
//   return error(ErrorCode::kInvalidInput, "{}: field '{}' is {}; expected a positive integer", path, name, value);
#pragma once

#include <fmt/format.h>

#include <cassert>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>

namespace nfp {

enum class ErrorCode {
  kInvalidInput,  // bytes from outside (file, request, prompt) that break a rule
  kNotFound,      // a file, model, tensor or id that is not there
  kUnsupported,   // understood, but not something we can do
  kIo,            // the operating system refused: permission, full disk, vanished file
  kResource,      // memory, KV blocks or queue places are used up
  kUsage,         // wrong flags; programs exit with 2 instead of 1
  kCancelled,     // somebody asked for it to stop
  kDevice,        // a device failed (or hangs) and does not come back: the process must be started again
};

// One line for a person: names the file, tensor, field or flag and says what to do.
struct Error {
  ErrorCode code = ErrorCode::kInvalidInput;
  std::string message;
};

template <typename... Args>
[[nodiscard]] Error error(ErrorCode code, fmt::format_string<Args...> format, Args&&... args) {
  return Error{code, fmt::format(format, std::forward<Args>(args)...)};
}

template <typename T>
class [[nodiscard]] Result {
  static_assert(!std::is_same_v<T, Error>);

 public:
  using value_type = T;

  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}  // NOLINT(google-explicit-constructor)
  Result(Error err) : state_(std::in_place_index<1>, std::move(err)) {}  // NOLINT(google-explicit-constructor)

  bool ok() const { return state_.index() == 0; }
  explicit operator bool() const { return ok(); }

  // Precondition of value(), * and ->: ok(). Precondition of error(): !ok().
  T& value() & { return *get(); }
  const T& value() const& { return *get(); }
  T&& value() && { return std::move(*get()); }
  T& operator*() & { return *get(); }
  const T& operator*() const& { return *get(); }
  T&& operator*() && { return std::move(*get()); }
  T* operator->() { return get(); }
  const T* operator->() const { return get(); }

  const Error& error() const& {
    assert(!ok());
    return *std::get_if<1>(&state_);
  }
  Error&& error() && {
    assert(!ok());
    return std::move(*std::get_if<1>(&state_));
  }

 private:
  T* get() {
    assert(ok());
    return std::get_if<0>(&state_);
  }
  const T* get() const {
    assert(ok());
    return std::get_if<0>(&state_);
  }
  std::variant<T, Error> state_;
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Error err) : error_(std::move(err)) {}  // NOLINT(google-explicit-constructor)

  bool ok() const { return !error_.has_value(); }
  explicit operator bool() const { return ok(); }
  const Error& error() const& {
    assert(!ok());
    return *error_;
  }
  Error&& error() && {
    assert(!ok());
    return std::move(*error_);
  }

 private:
  std::optional<Error> error_;
};

inline Status ok_status() { return {}; }

}  // namespace nfp

#define NFP_CONCAT_INNER(a, b) a##b
#define NFP_CONCAT(a, b) NFP_CONCAT_INNER(a, b)

#define NFP_RETURN_IF_ERROR(expr)                     \
  do {                                                \
    if (auto nfp_status = (expr); !nfp_status.ok()) { \
      return std::move(nfp_status).error();           \
    }                                                 \
  } while (false)

// `decl` may be any declaration (`auto x`, `Config config`) or an assignable expression.
// NOLINTBEGIN(bugprone-macro-parentheses): neither a declaration nor a new name may stand in parentheses.
#define NFP_ASSIGN_OR_RETURN(decl, expr) NFP_ASSIGN_OR_RETURN_IMPL(NFP_CONCAT(nfp_result_, __LINE__), decl, expr)
#define NFP_ASSIGN_OR_RETURN_IMPL(tmp, decl, expr) \
  auto tmp = (expr);                               \
  if (!tmp.ok()) return std::move(tmp).error();    \
  decl = std::move(tmp).value()
// NOLINTEND(bugprone-macro-parentheses)
