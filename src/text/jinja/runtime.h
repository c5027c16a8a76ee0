// One render's account: errors, limits and the values it makes. Inside this folder a failing template throws Failure,
// which ChatTemplate catches and turns into a Result: jinja2's semantics are those of exceptions, raised in the middle
// of any expression.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include "base/result.h"
#include "text/jinja/limits.h"
#include "text/jinja/value.h"

namespace nfp::jinja {

struct Failure {
  ErrorCode code = ErrorCode::kInvalidInput;
  std::string message;
  int line = 0;
};

class Runtime {
 public:
  explicit Runtime(const ChatTemplateLimits& limits) : limits_(limits) {}
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  [[noreturn]] void fail(std::string message) const {
    throw Failure{ErrorCode::kInvalidInput, std::move(message), line};
  }
  template <typename... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) const requires(sizeof...(Args) > 0) {
    fail(fmt::format(format, std::forward<Args>(args)...));
  }

  void step() {
    if (++steps_ > limits_.max_steps) steps_exceeded();
    if (steps_ % kStopEvery == 0 && limits_.stop.stop_requested()) stopped();
  }
  // Bytes that are looked at (a search, a comparison).
  void work(uint64_t bytes) {
    steps_ += bytes / 64;
    if (steps_ > limits_.max_steps) steps_exceeded();
  }
  // Bytes about to be made. Called before the memory is taken.
  void charge(uint64_t bytes) {
    if (bytes > limits_.max_memory_bytes - memory_) memory_exceeded();
    memory_ += bytes;
    work(bytes);
  }
  void check_output(uint64_t bytes) const {
    if (bytes > limits_.max_output_bytes) output_exceeded();
  }
  // How much of a string may still be made; a formatter that pads checks it first.
  uint64_t memory_left() const { return limits_.max_memory_bytes - memory_; }

  Value string(std::string text, bool safe = false) {
    charge(text.size() + sizeof(Str));
    return Value::string(heap_.string(std::move(text), safe));
  }
  template <typename T, typename... Args>
  T* make(Args&&... args) {
    charge(sizeof(T));
    return heap_.make<T>(std::forward<Args>(args)...);
  }
  void push(List& list, const Value& item) {
    step();
    charge(sizeof(Value));
    list.items.push_back(item);
  }
  void set(Dict& dict, const Value& key, const Value& value) {
    step();
    if (!is_hashable(key)) fail("unhashable type: '{}'", type_name(key));
    charge(sizeof(Dict::Entry));
    dict.set(key, value);
  }
  Value undefined(std::string message) {
    auto* undefined = make<Undefined>();
    undefined->message = std::move(message);
    return Value::object(Kind::kUndefined, undefined);
  }

  // Counts one level of nested evaluation while it lives.
  class Nest {
   public:
    explicit Nest(Runtime& rt) : rt_(rt) {
      if (++rt_.depth_ > rt_.limits_.max_depth) rt_.depth_exceeded();
    }
    ~Nest() { --rt_.depth_; }
    Nest(const Nest&) = delete;
    Nest& operator=(const Nest&) = delete;

   private:
    Runtime& rt_;
  };

  int line = 0;                                              // of the node that runs
  std::optional<std::chrono::system_clock::time_point> now;  // for strftime_now; nullopt: the clock

 private:
  static constexpr uint64_t kStopEvery = 1024;  // steps between two looks at the stop token

  [[noreturn]] void stopped() const { throw Failure{ErrorCode::kCancelled, "no longer wanted", line}; }
  [[noreturn]] void exceeded(std::string message) const {
    throw Failure{ErrorCode::kResource, std::move(message), line};
  }
  [[noreturn]] void steps_exceeded() const {
    exceeded(fmt::format("stopped after {} steps; the template seems to run without end", limits_.max_steps));
  }
  [[noreturn]] void memory_exceeded() const {
    exceeded(fmt::format("stopped: it needs more than {} bytes of memory", limits_.max_memory_bytes));
  }
  [[noreturn]] void output_exceeded() const {
    exceeded(fmt::format("stopped: it prints more than {} bytes", limits_.max_output_bytes));
  }
  [[noreturn]] void depth_exceeded() {
    --depth_;
    exceeded(fmt::format("stopped: nested deeper than {} levels; a macro or value seems to contain itself",
                         limits_.max_depth));
  }

  ChatTemplateLimits limits_;
  uint64_t steps_ = 0;
  uint64_t memory_ = 0;
  int depth_ = 0;
  Heap heap_;
};

}  // namespace nfp::jinja
