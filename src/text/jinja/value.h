// The values of a template: Python's None, bool, int, float, str, list, tuple, dict and what jinja2 adds (Undefined,
// namespaces, loops, macros); one render's account; and Python's operators on the values.
//
// A Value is a small handle; what it points to belongs to a Heap and lives as long as that Heap, which is one render.
// Nothing is freed before, so cycles (a namespace that holds itself) need no care, and the render's account (Runtime)
// bounds what a hostile template can take.
//
// Inside this folder a failing template throws Failure, which ChatTemplate catches and turns into a Result: jinja2's
// semantics are those of exceptions, raised in the middle of any expression.
#pragma once

#include <bit>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"
#include "text/jinja/chat_template.h"

namespace nfp::jinja {

// A Python int; |x| < kIntBound, so that unsigned 64-bit JSON numbers fit.
__extension__ typedef __int128 Int;  // NOLINT(modernize-use-using): __extension__ takes no alias
inline constexpr Int kIntBound = Int{1} << 120;

enum class Kind : uint8_t {
  kMissing,  // no value at all: a variable not set, an argument not given
  kUndefined,
  kNone,
  kBool,
  kInt,
  kFloat,
  kString,
  kList,
  kTuple,
  kView,      // of dict.items(), .keys(), .values() and range(): can be iterated, counted and searched
  kIterator,  // consumed once: what map, select and the like give
  kDict,
  kNamespace,
  kLoop,
  kMacro,
  kFunction,  // a global such as range, or a method bound to its object
};

// Base of all that lives on a Heap.
struct Object {
  virtual ~Object() = default;
};
struct Str;
struct Dict;

class Value {
 public:
  Value() = default;
  static Value none() { return Value(Kind::kNone); }
  static Value boolean(bool b) {
    Value v(Kind::kBool);
    v.int_ = b ? 1 : 0;
    return v;
  }
  static Value integer(Int i) {
    Value v(Kind::kInt);
    v.int_ = i;
    return v;
  }
  static Value real(double d) {
    Value v(Kind::kFloat);
    v.real_ = d;
    return v;
  }
  static Value object(Kind kind, Object* object) {
    Value v(kind);
    v.object_ = object;
    return v;
  }

  Kind kind() const { return kind_; }
  bool is(Kind k) const { return kind_ == k; }
  bool missing() const { return kind_ == Kind::kMissing; }
  bool undefined() const { return kind_ == Kind::kUndefined; }
  bool none_or_missing() const { return kind_ == Kind::kNone || kind_ == Kind::kMissing; }
  bool is_integral() const { return kind_ == Kind::kInt || kind_ == Kind::kBool; }  // bool is an int in Python
  bool is_number() const { return is_integral() || kind_ == Kind::kFloat; }
  bool is_sequence() const { return kind_ == Kind::kList || kind_ == Kind::kTuple; }
  bool has_items() const { return is_sequence() || kind_ == Kind::kView || kind_ == Kind::kIterator; }

  // Each accessor's precondition is the matching kind.
  Int as_int() const { return int_; }  // is_integral()
  double as_real() const { return real_; }
  const Str& as_str() const { return as<Str>(); }
  std::string_view text() const;            // of kString
  bool is_safe() const;                     // of any kind
  const std::vector<Value>& items() const;  // has_items()
  const Dict& as_dict() const { return as<Dict>(); }
  template <typename T>
  T& as() const {
    return *static_cast<T*>(object_);
  }
  Object* pointer() const { return object_; }

 private:
  explicit Value(Kind k) : kind_(k) {}

  Kind kind_ = Kind::kMissing;
  union {
    Int int_ = 0;
    double real_;
    Object* object_;
  };
};

struct Str : Object {
  explicit Str(std::string t, bool is_safe = false);
  bool ascii() const { return length == text.size(); }
  const std::string text;  // valid UTF-8
  const size_t length;     // in code points
  const bool safe;         // of the filter safe, or made of such a text: HTML, which + escapes what it joins with
};

struct List : Object {  // also a tuple and a view; never changed once a template can see it
  std::vector<Value> items;
  bool group = false;  // a tuple of groupby, whose items are also its attributes grouper and list
};
struct Iterator : List {
  size_t position = 0;
};

// Keeps the order of insertion. Keys are strings and integers; as in Python, 1 and true are one key. The index is a
// tree: hashes of keys from outside could be made to collide.
struct Dict : Object {
  struct Entry {
    Value key;
    Value value;
  };
  static bool is_key(const Value& v) { return v.is(Kind::kString) || v.is_integral(); }
  const Value* find(std::string_view key) const;
  const Value* find(const Value& key) const;
  void set(const Value& key, const Value& value);

  std::vector<Entry> entries;

 private:
  std::map<std::string, size_t, std::less<>> index_;  // text of a key -> place in entries
};

struct Undefined : Object {
  std::string message;  // what an error says when somebody uses the value
};

struct Namespace : Object {
  Dict attributes;  // keys are strings
};

// Owns objects; Runtime keeps the account of their size.
class Heap {
 public:
  template <typename T, typename... Args>
  T* make(Args&&... args) {
    auto owned = std::make_unique<T>(std::forward<Args>(args)...);
    T* raw = owned.get();
    objects_.push_back(std::move(owned));
    return raw;
  }
  Value string(std::string text, bool safe = false) {
    return Value::object(Kind::kString, make<Str>(std::move(text), safe));
  }

 private:
  std::vector<std::unique_ptr<Object>> objects_;
};

inline std::string_view Value::text() const { return as<Str>().text; }
inline bool Value::is_safe() const { return is(Kind::kString) && as<Str>().safe; }
inline const std::vector<Value>& Value::items() const { return as<List>().items; }

// Python's name of a value's type, for error messages: "str", "dict", "NoneType" ...
const char* type_name(const Value& v);

// --- One render's account: errors, limits and the values it makes

// Goes back to a member's old value when a block is left, also by an exception.
template <typename T>
class Restore {
 public:
  Restore(T& member, T value) : member_(member), old_(std::exchange(member, std::move(value))) {}
  ~Restore() { member_ = std::move(old_); }
  Restore(const Restore&) = delete;
  Restore& operator=(const Restore&) = delete;

 private:
  T& member_;
  T old_;
};

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
    ++steps_;
    check_steps();
    if (steps_ % kStopEvery == 0 && limits_.stop.stop_requested()) {
      throw Failure{ErrorCode::kCancelled, "no longer wanted", line};
    }
  }
  // Bytes that are looked at (a search, a comparison).
  void work(uint64_t bytes) {
    steps_ += bytes / 64;
    check_steps();
  }
  // Bytes about to be made, `count` times; called before the memory is taken.
  void charge(uint64_t bytes, Int count = 1) {
    if (count > 0 && bytes > 0 && count > static_cast<Int>((limits_.max_memory_bytes - memory_) / bytes)) {
      exceeded("stopped: it needs more than {} bytes of memory", limits_.max_memory_bytes);
    }
    const uint64_t total = count > 0 ? bytes * static_cast<uint64_t>(count) : 0;
    memory_ += total;
    work(total);
  }
  void check_output(uint64_t bytes) const {
    if (bytes > limits_.max_output_bytes) {
      exceeded("stopped: it prints more than {} bytes", limits_.max_output_bytes);
    }
  }

  template <typename T, typename... Args>
  T* make(Args&&... args) {
    charge(sizeof(T));
    return heap_.make<T>(std::forward<Args>(args)...);
  }
  Value string(std::string text, bool safe = false) {
    charge(text.size() + sizeof(Str));
    return heap_.string(std::move(text), safe);
  }
  Value string(std::string_view text) { return string(std::string(text)); }
  Value string(const char* text) { return string(std::string(text)); }
  // A text made of `source`: safe where that is.
  Value string_of(const Value& source, std::string text) { return string(std::move(text), source.is_safe()); }
  Value string_of(const Value& source, std::string_view text) { return string_of(source, std::string(text)); }
  Value list(std::vector<Value> items, Kind kind = Kind::kList) {
    charge(sizeof(Value), static_cast<Int>(items.size()));
    List* list = kind == Kind::kIterator ? make<Iterator>() : make<List>();
    list->items = std::move(items);
    return Value::object(kind, list);
  }
  Value tuple(const Value& a, const Value& b) { return list({a, b}, Kind::kTuple); }
  Value undefined(std::string message) {
    charge(message.size());
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

  // One level of nested evaluation, while what it returns lives.
  [[nodiscard]] Restore<int> nest() {
    if (depth_ >= limits_.max_depth) {
      exceeded("stopped: nested deeper than {} levels; a macro or value seems to contain itself", limits_.max_depth);
    }
    return Restore<int>(depth_, depth_ + 1);
  }

  int line = 0;                                              // of the node that runs
  std::optional<std::chrono::system_clock::time_point> now;  // for strftime_now; nullopt: the clock

 private:
  static constexpr uint64_t kStopEvery = 1024;  // steps between two looks at the stop token

  [[noreturn]] void unsupported_key(const Value& key) const {
    fail("a dict's key of type '{}' is not supported in chat templates", type_name(key));
  }
  template <typename Limit>
  [[noreturn]] void exceeded(fmt::format_string<const Limit&> format, const Limit& limit) const {
    throw Failure{ErrorCode::kResource, fmt::format(format, limit), line};
  }
  void check_steps() const {
    if (steps_ > limits_.max_steps) {
      exceeded("stopped after {} steps; the template seems to run without end", limits_.max_steps);
    }
  }

  ChatTemplateLimits limits_;
  uint64_t steps_ = 0;
  uint64_t memory_ = 0;
  int depth_ = 0;
  Heap heap_;
};

// --- Python's operators; all fail (throw Failure) where Python raises

enum class Compare : uint8_t { kEqual, kNotEqual, kLess, kLessEqual, kGreater, kGreaterEqual, kIn, kNotIn };
inline constexpr std::string_view kCompareSymbols[] = {
    "==", "!=", "<", "<=", ">", ">=", "in", "not"};  // of kNotIn: the first word
bool truthy(Runtime& rt, const Value& v);
bool equals(Runtime& rt, const Value& a, const Value& b);
bool identical(const Value& a, const Value& b);  // `is` of Python
bool compare(Runtime& rt, Compare op, const Value& a, const Value& b);
// `items` in the order of their `keys`; equal ones keep their order, also backwards. Equal keys are never asked which
// is less, so None and None sort. A template's values may be ordered inconsistently (NaN): the order is then any.
std::vector<Value> sorted(Runtime& rt, const std::vector<Value>& items, const std::vector<Value>& keys, bool reverse);

enum class Binary : uint8_t { kAdd, kSubtract, kMultiply, kDivide, kFloorDivide, kModulo, kPower };
inline constexpr std::string_view kBinarySymbols[] = {"+", "-", "*", "/", "//", "%", "**"};
Value arithmetic(Runtime& rt, Binary op, const Value& a, const Value& b);
Value negate(Runtime& rt, const Value& a);
Int int_argument(Runtime& rt, const Value& v, const char* what);  // what range, slices and widths take

// Attributes, items and slices, with the rules of jinja2's sandboxed environment: `a.b` looks for an attribute
// first and an item second, `a["b"]` the other way round, and what is not there is Undefined
Value get_item(Runtime& rt, const Value& object, const Value& key);            // object[key]
Value get_attribute(Runtime& rt, const Value& object, std::string_view name);  // object.name
Value own_attribute(Runtime& rt, const Value& object, std::string_view name);  // object | attr(name): no item
Value slice(Runtime& rt, const Value& object, const Value& start, const Value& stop, const Value& step);
// What jinja2's make_attrgetter looks up: "a.b.0", an index, or (none) the item itself. An undefined step on the way
// becomes `otherwise` (unless that is missing or None), and the way goes on from there.
Value path_item(Runtime& rt, const Value& object, const Value& path, const Value& otherwise = {});

Int length(Runtime& rt, const Value& v);
bool is_iterable(const Value& v);
class Cursor {
 public:
  Cursor(Runtime& rt, const Value& v);  // fails where v is not iterable
  bool next(Value* item);               // false at the end

 private:
  Runtime& rt_;
  Value v_;
  size_t at_ = 0;  // an index, or a byte of a string
};
std::vector<Value> items_of(Runtime& rt, const Value& v);  // list(v)

}  // namespace nfp::jinja
