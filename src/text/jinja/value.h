// The values of a template: Python's None, bool, int, float, str, list, tuple, dict and what jinja2 adds (Undefined,
// namespaces, loops, macros). A Value is a small handle; what it points to belongs to a Heap and lives as long as that
// Heap, which is one render. Nothing is freed before, so cycles (a namespace that holds itself) need no care, and the
// account of the render (runtime.h) bounds what a hostile template can take.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

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
  explicit Str(std::string t);
  bool ascii() const { return length == text.size(); }
  const std::string text;  // valid UTF-8
  const size_t length;     // in code points
};

struct List : Object {  // also a tuple and a view; never changed once a template can see it
  std::vector<Value> items;
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
  Value string(std::string text) { return Value::object(Kind::kString, make<Str>(std::move(text))); }

 private:
  std::vector<std::unique_ptr<Object>> objects_;
};

inline std::string_view Value::text() const { return as<Str>().text; }
inline const std::vector<Value>& Value::items() const { return as<List>().items; }

// Python's name of a value's type, for error messages: "str", "dict", "NoneType" ...
const char* type_name(const Value& v);

}  // namespace nfp::jinja
