// parse_json: in time and memory linear in the text, whatever the text is. The library's own reader looks every key up
// among those before it (an ordered object is a list), so an object of a million keys would take it hours.
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <numeric>

#include "server/api/json_text.h"

namespace nfp::server {
namespace {

// What a value takes beside its text: the value itself, its share of a vector with spare room, a heap block's overhead.
constexpr size_t kValueBytes = 64;
constexpr size_t kStopEvery = 64u << 10;  // bytes of text between two looks at the stop token; a power of two

// A place in a text that ends early once nobody wants it any more, be it in the middle of one long string.
class Character {
 public:
  using iterator_category = std::forward_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  Character(const char* at, const std::stop_token* stop) : at_(at), stop_(stop) {}
  reference operator*() const { return *at_; }
  Character& operator++() {
    ++at_;
    return *this;
  }
  Character operator++(int) { return Character(at_++, stop_); }
  // The reader compares each place with the end before it takes the character there.
  bool operator==(const Character& end) const {
    return at_ == end.at_ || (reinterpret_cast<uintptr_t>(at_) % kStopEvery == 0 && stop_->stop_requested());
  }

 private:
  const char* at_;
  const std::stop_token* stop_;
};

// Receives the library's events and builds the tree by appending only.
class TreeBuilder {
 public:
  explicit TreeBuilder(const JsonLimits& limits) : limits_(limits) {}

  bool null() { return add(Json(nullptr)) != nullptr; }
  bool boolean(bool value) { return add(Json(value)) != nullptr; }
  bool number_integer(Json::number_integer_t value) { return add(Json(value)) != nullptr; }
  bool number_unsigned(Json::number_unsigned_t value) { return add(Json(value)) != nullptr; }
  bool number_float(Json::number_float_t value, const std::string&) { return add(Json(value)) != nullptr; }
  bool string(std::string& value) {
    bytes_ += value.size();
    return add(Json(std::move(value))) != nullptr;
  }
  bool binary(Json::binary_t&) { return false; }  // text has none

  bool start_object(size_t) { return open(Json(Json::value_t::object)); }
  bool start_array(size_t) { return open(Json(Json::value_t::array)); }
  bool key(std::string& name) {
    auto& object = open_.back()->get_ref<Json::object_t&>();
    if (object.size() >= limits_.max_keys) {
      return refuse(ErrorCode::kInvalidInput,
                    fmt::format("too large: an object of it has more than {} keys", limits_.max_keys));
    }
    bytes_ += name.size();
    object.emplace_back(std::move(name), Json());
    return true;
  }
  bool end_object() {
    drop_repeated(open_.back()->get_ref<Json::object_t&>());
    open_.pop_back();
    return true;
  }
  bool end_array() {
    open_.pop_back();
    return true;
  }
  bool parse_error(size_t, const std::string&, const nlohmann::json::exception& failure) {
    // Without the library's "[json.exception.parse_error.101] ".
    std::string_view what = failure.what();
    if (const size_t end = what.find("] "); end != std::string_view::npos) what.remove_prefix(end + 2);
    return refuse(ErrorCode::kInvalidInput, fmt::format("not valid JSON: {}", what.substr(0, 300)));
  }

  Json take() { return std::move(root_); }
  Error failure() const { return Error{code_, message_}; }
  size_t bytes() const { return bytes_ + values_ * kValueBytes; }

 private:
  bool refuse(ErrorCode code, std::string message) {
    if (message_.empty()) {
      code_ = code;
      message_ = std::move(message);
    }
    return false;
  }

  Json* add(Json&& value) {
    if (++values_ > limits_.max_values) {
      refuse(ErrorCode::kInvalidInput, fmt::format("too large: it has more than {} values", limits_.max_values));
      return nullptr;
    }
    if (open_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    Json& parent = *open_.back();
    Json& place = parent.is_object() ? parent.get_ref<Json::object_t&>().back().second
                                     : parent.get_ref<Json::array_t&>().emplace_back();
    place = std::move(value);
    return &place;
  }

  bool open(Json&& container) {
    if (open_.size() >= static_cast<size_t>(limits_.max_depth)) {
      return refuse(ErrorCode::kInvalidInput, fmt::format("nested deeper than {} levels", limits_.max_depth));
    }
    Json* place = add(std::move(container));
    if (place == nullptr) return false;
    open_.push_back(place);
    return true;
  }

  // Of a key that comes twice the last value counts, in the first one's place, as the library has it. Found by sorting:
  // no choice of keys makes that slow, as it could a hash table.
  static void drop_repeated(Json::object_t& object) {
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
    Json::object_t kept;
    for (size_t i = 0; i < object.size(); ++i) {
      if (!repeated[i]) kept.emplace_back(object.data()[i].first, std::move(object.data()[i].second));
    }
    object = std::move(kept);
  }

  const JsonLimits& limits_;
  Json root_;
  // Containers being read, outermost first. A parent does not grow while a child is open, so the places hold.
  std::vector<Json*> open_;
  size_t values_ = 0;
  size_t bytes_ = 0;
  ErrorCode code_ = ErrorCode::kInvalidInput;
  std::string message_;
};

}  // namespace

Result<Json> parse_json(std::string_view text, const JsonLimits& limits, const std::stop_token& stop, size_t* bytes) {
  try {
    TreeBuilder builder(limits);
    const Character begin(text.data(), &stop), end(text.data() + text.size(), &stop);
    if (!Json::sax_parse(begin, end, &builder)) {
      if (stop.stop_requested()) return error(ErrorCode::kCancelled, "no longer wanted");
      return builder.failure();
    }
    if (bytes != nullptr) *bytes = builder.bytes();
    return builder.take();
  } catch (const std::exception& failure) {  // memory
    return error(ErrorCode::kResource, "not read: {}", failure.what());
  }
}

}  // namespace nfp::server
