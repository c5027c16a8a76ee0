#include "text/jinja/value.h"

#include <fmt/format.h>

#include "text/unicode.h"

namespace nfp::jinja {
namespace {

// A string stands for itself, an integer for a text that no string has (0xFF is not UTF-8).
std::string key_text(const Value& key) {
  return key.is(Kind::kString) ? std::string(key.text()) : fmt::format("\xFF{}", key.as_int());
}

}  // namespace

Str::Str(std::string t) : text(std::move(t)), length(text::count_code_points(text)) {}

const char* type_name(const Value& v) {
  constexpr const char* kNames[] = {"Undefined", "Undefined",   "NoneType", "bool",    "int",       "float",
                                    "str",       "list",        "tuple",    "view",    "generator", "dict",
                                    "Namespace", "LoopContext", "Macro",    "function"};
  return kNames[static_cast<size_t>(v.kind())];
}

const Value* Dict::find(std::string_view key) const {
  const auto it = index_.find(key);
  return it == index_.end() ? nullptr : &entries[it->second].value;
}

const Value* Dict::find(const Value& key) const {
  return key.is(Kind::kString) ? find(key.text()) : is_key(key) ? find(key_text(key)) : nullptr;
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
