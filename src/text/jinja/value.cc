#include "text/jinja/value.h"

#include <cmath>
#include <functional>

#include "text/jinja/unicode_text.h"

namespace nfp::jinja {
namespace {

// Dicts of up to this many entries are searched one by one.
constexpr size_t kSmallDict = 8;
// Tuples nested deeper than this do not hash or compare as keys, so that neither recurses without bound.
constexpr int kMaxKeyDepth = 64;

bool hashable(const Value& v, int depth) {
  if (v.is(Kind::kTuple)) {
    if (depth >= kMaxKeyDepth) return false;
    for (const Value& item : v.as_list().items) {
      if (!hashable(item, depth + 1)) return false;
    }
    return true;
  }
  return !v.is(Kind::kList) && !v.is(Kind::kDict) && !v.is(Kind::kView);
}

uint64_t mix(uint64_t h) {
  h ^= h >> 33;
  h *= 0xff51afd7ed558ccdULL;
  h ^= h >> 33;
  return h;
}

uint64_t hash_text(std::string_view text) { return mix(std::hash<std::string_view>{}(text)); }

bool integral_value(double d, Int* out) {
  if (!(std::fabs(d) < 0x1p119) || d != std::floor(d)) return false;
  *out = static_cast<Int>(d);
  return true;
}

}  // namespace

Int Range::size() const {
  if (step > 0) return start < stop ? (stop - start - 1) / step + 1 : 0;
  return start > stop ? (start - stop - 1) / -step + 1 : 0;
}

Str* Heap::string(std::string text, bool safe) {
  const size_t length = unicode::count(text);
  return make<Str>(std::move(text), length, safe);
}

const char* type_name(const Value& v) {
  switch (v.kind()) {
    case Kind::kMissing:
    case Kind::kUndefined:
      return "Undefined";
    case Kind::kNone:
      return "NoneType";
    case Kind::kBool:
      return "bool";
    case Kind::kInt:
      return "int";
    case Kind::kFloat:
      return "float";
    case Kind::kString:
      return v.as_str().safe ? "Markup" : "str";
    case Kind::kList:
      return "list";
    case Kind::kTuple:
      return "tuple";
    case Kind::kDict:
      return "dict";
    case Kind::kView: {
      const auto part = v.as<View>().part;
      return part == View::kKeys ? "dict_keys" : part == View::kValues ? "dict_values" : "dict_items";
    }
    case Kind::kRange:
      return "range";
    case Kind::kIterator:
      return v.as<Iterator>().type_name;
    case Kind::kNamespace:
      return "Namespace";
    case Kind::kLoop:
      return "LoopContext";
    case Kind::kMacro:
      return "Macro";
    case Kind::kFunction:
      return "function";
    case Kind::kMethod:
      return "builtin_function_or_method";
    case Kind::kCycler:
      return "Cycler";
    case Kind::kJoiner:
      return "Joiner";
  }
  return "object";
}

bool is_hashable(const Value& v) { return hashable(v, 0); }

bool equal_numbers(const Value& a, const Value& b) {
  if (a.is_integral() && b.is_integral()) return a.as_int() == b.as_int();
  if (a.is(Kind::kFloat) && b.is(Kind::kFloat)) return a.as_real() == b.as_real();
  const Value& real = a.is(Kind::kFloat) ? a : b;
  const Value& whole = a.is(Kind::kFloat) ? b : a;
  Int as_whole = 0;
  return integral_value(real.as_real(), &as_whole) && as_whole == whole.as_int();
}

uint64_t hash_key(const Value& v) {
  switch (v.kind()) {
    case Kind::kBool:
    case Kind::kInt: {
      const Int i = v.as_int();
      return mix(static_cast<uint64_t>(i) ^ static_cast<uint64_t>(i >> 64) * 31);
    }
    case Kind::kFloat: {
      Int whole = 0;
      return integral_value(v.as_real(), &whole) ? hash_key(Value::integer(whole))
                                                 : mix(std::hash<double>{}(v.as_real()));
    }
    case Kind::kString:
      return hash_text(v.text());
    case Kind::kTuple: {
      uint64_t h = 0x9E3779B97F4A7C15ULL;
      for (const Value& item : v.as_list().items) h = mix(h ^ hash_key(item));
      return h;
    }
    case Kind::kMissing:
    case Kind::kUndefined:
    case Kind::kNone:
      return mix(static_cast<uint64_t>(v.kind()));
    default:
      return mix(reinterpret_cast<uintptr_t>(v.pointer()));
  }
}

bool equal_keys(const Value& a, const Value& b) {
  if (a.is_number() && b.is_number()) return equal_numbers(a, b);
  if (a.kind() != b.kind()) return false;
  switch (a.kind()) {
    case Kind::kString:
      return a.text() == b.text();
    case Kind::kTuple: {
      const auto& left = a.as_list().items;
      const auto& right = b.as_list().items;
      if (left.size() != right.size()) return false;
      for (size_t i = 0; i < left.size(); ++i) {
        if (!equal_keys(left[i], right[i])) return false;
      }
      return true;
    }
    case Kind::kMissing:
    case Kind::kUndefined:
    case Kind::kNone:
      return true;
    case Kind::kFunction:
      return a.as_function() == b.as_function();
    case Kind::kMethod:
      return a.as_method() == b.as_method() && equal_keys(a.self(), b.self());
    default:
      return a.pointer() == b.pointer();
  }
}

const Value* Dict::find_hashed(const Value& key, uint64_t hash) const {
  const auto [begin, end] = index_.equal_range(hash);
  for (auto it = begin; it != end; ++it) {
    const Entry& entry = entries[it->second];
    if (equal_keys(entry.key, key)) return &entry.value;
  }
  return nullptr;
}

const Value* Dict::find(const Value& key) const {
  if (!index_.empty()) return find_hashed(key, hash_key(key));
  for (const Entry& entry : entries) {
    if (equal_keys(entry.key, key)) return &entry.value;
  }
  return nullptr;
}

const Value* Dict::find(std::string_view key) const {
  if (!index_.empty()) {
    const auto [begin, end] = index_.equal_range(hash_text(key));
    for (auto it = begin; it != end; ++it) {
      const Entry& entry = entries[it->second];
      if (entry.key.is(Kind::kString) && entry.key.text() == key) return &entry.value;
    }
    return nullptr;
  }
  for (const Entry& entry : entries) {
    if (entry.key.is(Kind::kString) && entry.key.text() == key) return &entry.value;
  }
  return nullptr;
}

void Dict::set(const Value& key, const Value& value) {
  if (const Value* present = find(key)) {
    *const_cast<Value*>(present) = value;
    return;
  }
  entries.push_back({key, value});
  if (entries.size() <= kSmallDict) return;
  if (index_.empty()) {
    for (size_t i = 0; i < entries.size(); ++i) index_.emplace(hash_key(entries[i].key), static_cast<uint32_t>(i));
  } else {
    index_.emplace(hash_key(key), static_cast<uint32_t>(entries.size() - 1));
  }
}

}  // namespace nfp::jinja
