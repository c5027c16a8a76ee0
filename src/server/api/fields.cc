#include <algorithm>
#include <cmath>

#include "server/api/generation_request.h"

namespace nfp::server {

std::string Fields::path(std::string_view name) const {
  return place_.empty() ? std::string(name) : fmt::format("{}.{}", place_, name);
}

const Json* Fields::find(std::string_view name) {
  known_.push_back(name);
  const auto place = object_.find(std::string(name));
  return place == object_.end() || place->is_null() ? nullptr : &*place;
}

MaybeError Fields::get(std::string_view name, bool* out) {
  const Json* value = find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_boolean()) return bad_request(path(name), fmt::format("'{}' must be true or false", path(name)));
  *out = value->get<bool>();
  return std::nullopt;
}

MaybeError Fields::get(std::string_view name, std::string* out) {
  const Json* value = find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) return bad_request(path(name), fmt::format("'{}' must be a string", path(name)));
  *out = value->get<std::string>();
  return std::nullopt;
}

MaybeError Fields::get(std::string_view name, int64_t low, int64_t high, int64_t* out) {
  const Json* value = find(name);
  if (value == nullptr) return std::nullopt;
  const auto refuse = [&] {
    return bad_request(path(name), fmt::format("'{}' must be an integer from {} to {}", path(name), low, high));
  };
  int64_t number = 0;
  if (value->is_number_unsigned()) {
    const auto wide = value->get<uint64_t>();
    if (wide > static_cast<uint64_t>(INT64_MAX)) return refuse();
    number = static_cast<int64_t>(wide);
  } else if (value->is_number_integer()) {
    number = value->get<int64_t>();
  } else if (value->is_number_float()) {  // 1.0 is an integer in JSON's eyes
    const double real = value->get<double>();
    if (!(std::abs(real) < 9e15) || real != std::floor(real)) return refuse();
    number = static_cast<int64_t>(real);
  } else {
    return refuse();
  }
  if (number < low || number > high) return refuse();
  *out = number;
  return std::nullopt;
}

MaybeError Fields::get(std::string_view name, int low, int high, int* out) {
  int64_t wide = *out;
  NFP_API_TRY(get(name, int64_t{low}, int64_t{high}, &wide));
  *out = static_cast<int>(wide);
  return std::nullopt;
}

MaybeError Fields::get(std::string_view name, float* out) {
  const Json* value = find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number()) return bad_request(path(name), fmt::format("'{}' must be a number", path(name)));
  const auto number = static_cast<float>(value->get<double>());
  if (!std::isfinite(number)) return bad_request(path(name), fmt::format("'{}' is too large", path(name)));
  *out = number;
  return std::nullopt;
}

MaybeError Fields::unsupported(std::string_view name, std::string_view why) {
  const Json* value = find(name);
  if (value == nullptr) return std::nullopt;
  const bool inert = (value->is_boolean() && !value->get<bool>()) ||
                     (value->is_number() && value->get<double>() == 0) ||
                     (value->is_string() && value->get_ref<const std::string&>().empty()) ||
                     (value->is_structured() && value->empty());
  if (inert) return std::nullopt;
  return bad_request(path(name), fmt::format("'{}' is not supported: {}", path(name), why), "unsupported_parameter");
}

namespace {

// In a header, where anything but printable ASCII has no place.
void tell_ignored(std::string name, std::vector<std::string>* ignored) {
  constexpr size_t kMostNames = 16;
  if (ignored->size() > kMostNames) return;
  std::replace_if(
      name.begin(), name.end(), [](char c) { return c <= ' ' || c >= 0x7F || c == ','; }, '?');
  if (ignored->size() == kMostNames) name = "...";
  if (std::find(ignored->begin(), ignored->end(), name) == ignored->end()) ignored->push_back(std::move(name));
}

}  // namespace

MaybeError Fields::rest() const {
  for (const auto& [name, value] : object_.items()) {
    if (std::find(known_.begin(), known_.end(), name) == known_.end()) {
      const std::string shown = path(name.substr(0, 64));
      return bad_request(shown, fmt::format("unknown parameter '{}'", shown), "unknown_parameter");
    }
  }
  return std::nullopt;
}

MaybeError Fields::rest(const RequestLimits& limits, std::vector<std::string>* ignored) const {
  if (limits.strict || ignored == nullptr) return rest();
  for (const auto& item : object_.items()) {
    if (std::find(known_.begin(), known_.end(), item.key()) != known_.end()) continue;
    tell_ignored(path(item.key().substr(0, 64)), ignored);
  }
  return std::nullopt;
}

MaybeError Unknown::check(const Json& object, const std::string& where,
                          std::initializer_list<const char*> known) const {
  Fields fields(object, where);
  for (const char* name : known) fields.without_effect(name);
  return fields.rest(limits, ignored);
}

MaybeError Unknown::leave_out(std::string where, std::string why) const {
  if (limits.strict || ignored == nullptr) return bad_request(std::move(where), std::move(why));
  tell_ignored(std::move(where), ignored);
  return std::nullopt;
}

}  // namespace nfp::server
