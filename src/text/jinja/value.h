// The values of a template: Python's None, bool, int, float, str, list, tuple, dict and what jinja2 adds (Undefined,
// namespaces, loops, macros). A Value is a small handle; what it points to belongs to a Heap and lives as long as that
// Heap, which is one render. Nothing is freed before, so cycles (a namespace that holds itself) need no care, and the
// Heap's budget bounds what a hostile template can take.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace nfp::jinja {

// A Python int; |x| < kIntBound, so that unsigned 64-bit JSON numbers fit.
__extension__ typedef __int128 Int;            // NOLINT(modernize-use-using): __extension__ takes no alias
__extension__ typedef unsigned __int128 UInt;  // NOLINT(modernize-use-using)
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
  kDict,
  kView,  // dict.items(), .keys(), .values()
  kRange,
  kIterator,  // consumed once: what map, select and the like return
  kNamespace,
  kLoop,
  kMacro,
  kFunction,  // a global such as range
  kMethod,    // of a string, list, dict ..., bound to it
  kCycler,
  kJoiner,
};

enum class Method : uint16_t;
enum class Function : uint16_t;

// Base of all that lives on a Heap.
struct Object {
  virtual ~Object() = default;
};

struct Str;
struct List;
struct Dict;

class Value {
 public:
  Value() = default;
  static Value none() { return Value(Kind::kNone); }
  static Value boolean(bool b) {
    Value v(Kind::kBool);
    v.low_ = b ? 1 : 0;
    return v;
  }
  static Value integer(Int i) {
    Value v(Kind::kInt);
    v.low_ = static_cast<uint64_t>(i);
    v.high_ = static_cast<int64_t>(i >> 64);
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
  static Value string(Str* s);
  static Value list(List* l);
  static Value tuple(List* l);
  static Value dict(Dict* d);
  static Value function(Function f) {
    Value v(Kind::kFunction);
    v.method_ = static_cast<uint16_t>(f);
    return v;
  }
  static Value method(const Value& self, Method m) {
    Value v = self;
    v.kind_ = Kind::kMethod;
    v.self_kind_ = self.kind_;
    v.method_ = static_cast<uint16_t>(m);
    return v;
  }

  Kind kind() const { return kind_; }
  bool is(Kind k) const { return kind_ == k; }
  bool missing() const { return kind_ == Kind::kMissing; }
  bool undefined() const { return kind_ == Kind::kUndefined; }
  bool none_or_missing() const { return kind_ == Kind::kNone || kind_ == Kind::kMissing; }
  bool is_integral() const { return kind_ == Kind::kInt || kind_ == Kind::kBool; }  // bool is an int in Python
  bool is_number() const { return is_integral() || kind_ == Kind::kFloat; }
  bool is_list_like() const { return kind_ == Kind::kList || kind_ == Kind::kTuple; }

  // Each accessor's precondition is the matching kind; as_int also takes kBool.
  bool as_bool() const { return low_ != 0; }
  Int as_int() const {
    return kind_ == Kind::kBool ? static_cast<Int>(low_) : static_cast<Int>(static_cast<UInt>(high_) << 64 | low_);
  }
  double as_real() const { return real_; }
  const Str& as_str() const;
  std::string_view text() const;  // of kString
  const List& as_list() const;    // of kList and kTuple
  const Dict& as_dict() const;
  template <typename T>
  T& as() const {
    return *static_cast<T*>(object_);
  }
  Object* pointer() const { return object_; }
  Function as_function() const { return static_cast<Function>(method_); }
  Method as_method() const { return static_cast<Method>(method_); }
  Value self() const {  // of kMethod
    Value v = *this;
    v.kind_ = self_kind_;
    return v;
  }

 private:
  explicit Value(Kind k) : kind_(k) {}

  Kind kind_ = Kind::kMissing;
  Kind self_kind_ = Kind::kMissing;
  uint16_t method_ = 0;
  int64_t high_ = 0;  // of an int
  union {
    uint64_t low_ = 0;
    double real_;
    Object* object_;
  };
};

struct Str : Object {
  Str(std::string t, size_t code_points, bool is_safe) : text(std::move(t)), length(code_points), safe(is_safe) {}
  bool ascii() const { return length == text.size(); }
  const std::string text;  // valid UTF-8
  const size_t length;     // in code points
  const bool safe;         // markupsafe's Markup: not to be escaped again
};

struct List : Object {  // also a tuple; never changed once a template can see it
  std::vector<Value> items;
  bool is_group = false;  // a tuple of groupby, whose items also go by the names grouper and list
};

// Keys are hashable values; 1, 1.0 and true are the same key. Order of insertion.
struct Dict : Object {
  struct Entry {
    Value key;
    Value value;
  };
  const Value* find(const Value& key) const;
  const Value* find(std::string_view key) const;
  void set(const Value& key, const Value& value);

  std::vector<Entry> entries;

 private:
  const Value* find_hashed(const Value& key, uint64_t hash) const;
  std::unordered_multimap<uint64_t, uint32_t> index_;  // hash -> place in entries; empty while the dict is small
};

struct Undefined : Object {
  std::string message;  // what an error says when somebody uses the value
};

struct View : Object {
  enum Part { kKeys, kValues, kItems } part = kKeys;
  const Dict* dict = nullptr;
};

struct Range : Object {
  Int start = 0, stop = 0, step = 1;
  Int size() const;
  Int at(Int i) const { return start + i * step; }
};

class Runtime;

struct Iterator : Object {
  // Puts the next item into *item, or returns false at the end.
  virtual bool next(Runtime& rt, Value* item) = 0;
  const char* type_name = "generator";
};

struct Namespace : Object {
  Dict attributes;  // keys are strings
};

struct Cycler : Object {
  std::vector<Value> items;  // not empty
  size_t position = 0;
};

struct Joiner : Object {
  Value separator;
  bool used = false;
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
  Str* string(std::string text, bool safe = false);

 private:
  std::vector<std::unique_ptr<Object>> objects_;
};

inline Value Value::string(Str* s) { return object(Kind::kString, s); }
inline Value Value::list(List* l) { return object(Kind::kList, l); }
inline Value Value::tuple(List* l) { return object(Kind::kTuple, l); }
inline Value Value::dict(Dict* d) { return object(Kind::kDict, d); }
inline const Str& Value::as_str() const { return as<Str>(); }
inline std::string_view Value::text() const { return as<Str>().text; }
inline const List& Value::as_list() const { return as<List>(); }
inline const Dict& Value::as_dict() const { return as<Dict>(); }

// Python's name of a value's type, for error messages: "str", "dict", "NoneType" ...
const char* type_name(const Value& v);

// Whether a value may be a key: no list or dict, nor a tuple holding one.
bool is_hashable(const Value& v);
uint64_t hash_key(const Value& v);                   // precondition: is_hashable
bool equal_keys(const Value& a, const Value& b);     // precondition: both hashable
bool equal_numbers(const Value& a, const Value& b);  // precondition: both is_number()

}  // namespace nfp::jinja
