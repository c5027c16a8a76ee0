#include "text/jinja/value.h"

#include <cmath>

#include "text/unicode.h"

namespace nfp::jinja {
namespace {

// Dicts of up to this many entries are searched one by one.
constexpr size_t kSmallDict = 8;

bool is_nan(const Value& v) { return v.is(Kind::kFloat) && std::isnan(v.as_real()); }

// What is never equal to each other as keys.
int rank(const Value& v) {
  if (v.is_number()) return is_nan(v) ? 3 : 0;
  if (v.is(Kind::kString)) return 1;
  return v.none_or_missing() || v.undefined() ? 2 : 4;
}

bool equal_keys(const Value& a, const Value& b) {
  if (rank(a) != rank(b)) return false;
  switch (rank(a)) {
    case 0:
      return compare_numbers(a, b) == 0;
    case 1:
      return a.text() == b.text();
    case 2:
      return a.kind() == b.kind();
    case 3:
      return true;
    default:
      return a.pointer() == b.pointer();
  }
}

}  // namespace

Str::Str(std::string t) : text(std::move(t)), length(text::count_code_points(text)) {}

Int Range::size() const {
  if (step > 0) return start < stop ? (stop - start - 1) / step + 1 : 0;
  return start > stop ? (start - stop - 1) / -step + 1 : 0;
}

const char* type_name(const Value& v) {
  constexpr const char* kNames[] = {"Undefined", "Undefined", "NoneType",    "bool",       "int",       "float",
                                    "str",       "list",      "tuple",       "dict_items", "generator", "dict",
                                    "range",     "Namespace", "LoopContext", "Macro",      "function"};
  return v.is(Kind::kView) ? v.as<View>().type_name : kNames[static_cast<size_t>(v.kind())];
}

bool is_key(const Value& v) { return !v.has_items() && !v.is(Kind::kDict) && !v.is(Kind::kRange); }

int compare_numbers(const Value& a, const Value& b) {
  const auto sign = [](auto x, auto y) { return x < y ? -1 : x > y ? 1 : 0; };
  if (is_nan(a) || is_nan(b)) return 2;
  if (a.is_integral() && b.is_integral()) return sign(a.as_int(), b.as_int());
  if (a.is(Kind::kFloat) && b.is(Kind::kFloat)) return sign(a.as_real(), b.as_real());
  if (a.is_integral()) return -compare_numbers(b, a);
  // A float and an int; only a float beyond the range of Int need not be turned into one.
  const double real = a.as_real();
  if (std::fabs(real) >= 0x1p121) return real > 0 ? 1 : -1;
  const double floor = std::floor(real);
  const int whole = sign(static_cast<Int>(floor), b.as_int());
  return whole != 0 ? whole : real > floor ? 1 : 0;
}

bool KeyLess::operator()(const Value& a, const Value& b) const {
  if (rank(a) != rank(b)) return rank(a) < rank(b);
  switch (rank(a)) {
    case 0:
      return compare_numbers(a, b) < 0;
    case 1:
      return a.text() < b.text();
    case 2:
      return a.kind() < b.kind();
    case 3:
      return false;
    default:
      return std::less<Object*>{}(a.pointer(), b.pointer());
  }
}
bool KeyLess::operator()(const Value& a, std::string_view b) const { return rank(a) != 1 ? rank(a) < 1 : a.text() < b; }
bool KeyLess::operator()(std::string_view a, const Value& b) const { return rank(b) != 1 ? 1 < rank(b) : a < b.text(); }

const Value* Dict::find(const Value& key) const {
  if (key.is(Kind::kString)) return find(key.text());
  if (!index_.empty()) {
    const auto it = index_.find(key);
    return it == index_.end() ? nullptr : &entries[it->second].value;
  }
  for (const Entry& entry : entries) {
    if (equal_keys(entry.key, key)) return &entry.value;
  }
  return nullptr;
}

const Value* Dict::find(std::string_view key) const {
  if (!index_.empty()) {
    const auto it = index_.find(key);
    return it == index_.end() ? nullptr : &entries[it->second].value;
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
  for (size_t i = index_.size(); i < entries.size(); ++i) index_.emplace(entries[i].key, static_cast<uint32_t>(i));
}

}  // namespace nfp::jinja
