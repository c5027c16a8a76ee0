#include "text/jinja/value.h"

#include <fmt/format.h>

#include <cmath>

#include "text/unicode.h"

namespace nfp::jinja {
namespace {

bool is_nan(const Value& v) { return v.is(Kind::kFloat) && std::isnan(v.as_real()); }

// A string stands for itself, and other keys for texts that no string has (0xFF is not UTF-8).
std::string key_text(const Value& key) {
  if (key.is(Kind::kString)) return std::string(key.text());
  if (!key.is_number())
    return fmt::format("\xFF{} {}", type_name(key),
                       key.is(Kind::kNone) || key.undefined() ? 0 : reinterpret_cast<uintptr_t>(key.pointer()));
  const bool whole =
      key.is_integral() || (std::fabs(key.as_real()) < 0x1p119 && std::floor(key.as_real()) == key.as_real());
  return whole ? fmt::format("\xFF{}", key.is(Kind::kFloat) ? static_cast<Int>(key.as_real()) : key.as_int())
               : fmt::format("\xFF{}", key.as_real());
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

const Value* Dict::find(std::string_view key) const {
  const auto it = index_.find(key);
  return it == index_.end() ? nullptr : &entries[it->second].value;
}

const Value* Dict::find(const Value& key) const {
  return key.is(Kind::kString) ? find(key.text()) : find(key_text(key));
}

void Dict::set(const Value& key, const Value& value) {
  const auto [it, added] = index_.try_emplace(key_text(key), entries.size());
  if (added) {
    entries.push_back({key, value});
  } else {
    entries[it->second].value = value;
  }
}

}  // namespace nfp::jinja
