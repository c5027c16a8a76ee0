// A tree of JSON whose objects keep their order, in time linear in the text (keys are sorted once, to find those that
// come twice). The library's own reader looks every key up among those before it (an ordered object is a list), so an
// object of a million keys would take it hours.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

namespace nfp {

// Receives the library's events and builds the tree by appending only. `Json`: nlohmann::ordered_json.
template <class Json>
class JsonTree {
 public:
  bool null() { return add(Json(nullptr)); }
  bool boolean(bool value) { return add(Json(value)); }
  bool number_integer(typename Json::number_integer_t value) { return add(Json(value)); }
  bool number_unsigned(typename Json::number_unsigned_t value) { return add(Json(value)); }
  bool number_float(typename Json::number_float_t value, const std::string&) { return add(Json(value)); }
  bool string(std::string& value) { return add(Json(std::move(value))); }
  bool binary(typename Json::binary_t&) { return false; }  // text has none

  bool start_object(size_t) { return open(Json(Json::value_t::object)); }
  bool start_array(size_t) { return open(Json(Json::value_t::array)); }
  bool key(std::string& name) {
    innermost().emplace_back(std::move(name), Json());
    awaits_value_ = true;
    return true;
  }
  bool end_object() {
    drop_repeated(innermost());
    open_.pop_back();
    return true;
  }
  bool end_array() {
    open_.pop_back();
    return true;
  }
  bool parse_error(size_t, const std::string&, const typename Json::exception&) { return false; }

  // Ends all that is open, where the text was cut off. A key without a value is dropped.
  void cut() {
    if (std::exchange(awaits_value_, false)) innermost().pop_back();
    while (!open_.empty()) open_.back()->is_object() ? end_object() : end_array();
  }

  Json take() { return std::move(root_); }
  size_t depth() const { return open_.size(); }
  size_t keys() { return innermost().size(); }  // so far, of the object being read

 private:
  using Object = typename Json::object_t;

  Object& innermost() { return open_.back()->template get_ref<Object&>(); }

  Json& place(Json&& value) {
    awaits_value_ = false;
    if (open_.empty()) return root_ = std::move(value);
    Json& parent = *open_.back();
    Json& place = parent.is_object() ? innermost().back().second
                                     : parent.template get_ref<typename Json::array_t&>().emplace_back();
    return place = std::move(value);
  }
  bool add(Json&& value) {
    place(std::move(value));
    return true;
  }
  bool open(Json&& container) {
    open_.push_back(&place(std::move(container)));
    return true;
  }

  // Of a key that comes twice the last value counts, in the first one's place, as the library has it. Found by sorting:
  // no choice of keys makes that slow, as it could a hash table.
  static void drop_repeated(Object& object) {
    if (object.size() < 2) return;
    std::vector<uint32_t> order(object.size());
    std::iota(order.begin(), order.end(), 0u);
    const auto name = [&](uint32_t i) -> const std::string& { return object.data()[i].first; };
    std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
      const int compared = name(a).compare(name(b));
      return compared != 0 ? compared < 0 : a < b;
    });
    std::vector<bool> repeated(object.size(), false);
    bool any = false;
    for (size_t begin = 0, end = 0; begin < order.size(); begin = end) {
      for (end = begin + 1; end < order.size() && name(order[end]) == name(order[begin]); ++end) {
        repeated[order[end]] = any = true;
      }
      if (end > begin + 1) object.data()[order[begin]].second = std::move(object.data()[order[end - 1]].second);
    }
    if (!any) return;
    Object kept;
    for (size_t i = 0; i < object.size(); ++i) {
      if (!repeated[i]) kept.emplace_back(object.data()[i].first, std::move(object.data()[i].second));
    }
    object = std::move(kept);
  }

  Json root_;
  // Containers being read, outermost first. A parent does not grow while a child is open, so the places hold.
  std::vector<Json*> open_;
  bool awaits_value_ = false;  // a key has come
};

}  // namespace nfp
