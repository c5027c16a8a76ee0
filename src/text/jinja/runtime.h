// One render's account: errors, limits and the values it makes. Inside this folder a failing template throws Failure,
// which ChatTemplate catches and turns into a Result: jinja2's semantics are those of exceptions, raised in the middle
// of any expression.
#pragma once

#include <array>
#include <bit>
#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

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
  [[noreturn]] void fail_undefined(const Value& undefined) const { fail(undefined.as<Undefined>().message); }

  void step() {
    if (++steps_ > limits_.max_steps) steps_exceeded();
    if (steps_ % kStopEvery == 0 && limits_.stop.stop_requested()) stopped();
  }
  // Bytes that are looked at (a search, a comparison).
  void work(uint64_t bytes) {
    steps_ += bytes / 64;
    if (steps_ > limits_.max_steps) steps_exceeded();
  }
  // Bytes about to be made, `count` times; called before the memory is taken.
  void charge(uint64_t bytes, Int count = 1) {
    if (count > 0 && bytes > 0 && count > static_cast<Int>((limits_.max_memory_bytes - memory_) / bytes)) {
      memory_exceeded();
    }
    const uint64_t total = count > 0 ? bytes * static_cast<uint64_t>(count) : 0;
    memory_ += total;
    work(total);
  }
  void check_output(uint64_t bytes) const {
    if (bytes > limits_.max_output_bytes) output_exceeded();
  }

  template <typename T, typename... Args>
  T* make(Args&&... args) {
    charge(sizeof(T));
    return heap_.make<T>(std::forward<Args>(args)...);
  }
  Value string(std::string text) {
    charge(text.size() + sizeof(Str));
    return heap_.string(std::move(text));
  }
  Value string(std::string_view text) { return string(std::string(text)); }
  Value string(const char* text) { return string(std::string(text)); }
  Value list(std::vector<Value> items, Kind kind = Kind::kList) {
    charge(sizeof(Value), static_cast<Int>(items.size()));
    List* list = kind == Kind::kIterator ? make<Iterator>() : make<List>();
    list->items = std::move(items);
    return Value::object(kind, list);
  }
  Value tuple(const Value& a, const Value& b) { return list({a, b}, Kind::kTuple); }
  Value undefined(std::string message) {
    auto* undefined = make<Undefined>();
    undefined->message = std::move(message);
    return Value::object(Kind::kUndefined, undefined);
  }

  const Value* find(const Dict& dict, std::string_view key) {
    step();
    work(key.size() * std::bit_width(dict.entries.size()));
    return dict.find(key);
  }
  const Value* find(const Dict& dict, const Value& key) {
    if (key.is(Kind::kString)) return find(dict, key.text());
    step();
    if (key.is(Kind::kList) || key.is(Kind::kDict)) fail("unhashable type: '{}'", type_name(key));
    if (key.is(Kind::kFloat)) unsupported_key(key);
    return dict.find(key);
  }
  void set(Dict& dict, const Value& key, const Value& value) {
    if (!Dict::is_key(key)) unsupported_key(key);
    find(dict, key);
    charge(2 * sizeof(Dict::Entry) + (key.is(Kind::kString) ? key.text().size() : 0));
    dict.set(key, value);
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

  [[noreturn]] void unsupported_key(const Value& key) const {
    fail("a dict's key of type '{}' is not supported in chat templates", type_name(key));
  }
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

// --- What a template can call

struct Args {
  const Value& operator[](size_t place) const {
    static const Value kNotGiven{};
    return place < positional.size() ? positional[place] : kNotGiven;
  }
  std::vector<Value> positional;
  std::vector<std::pair<std::string_view, Value>> named;
};

// A filter of `subject`, a method of it, or a global function (which has none).
struct Callable {
  static constexpr size_t kAny = 255;  // takes its arguments as they come, also named ones

  std::string_view name;
  Value (*call)(Runtime& rt, const Value& subject, const Args& args);
  size_t least = 0, most = 0;                       // arguments
  std::array<std::string_view, 4> parameters = {};  // their names; none: Python takes them by place only
};
struct Function : Object {
  const Callable* callable = nullptr;
  Value self;
};

// Puts the arguments into places, as a Python function with these parameters does, and calls.
Value invoke(Runtime& rt, const Callable& callable, const Value& subject, const Args& args);

}  // namespace nfp::jinja
