// parse_json: in time and memory linear in the text, whatever the text is (base/json_tree.h).
#include <cstdint>
#include <iterator>
#include <utility>

#include "base/json_tree.h"
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

// Counts what the library reads, and builds the tree of it.
class TreeBuilder {
 public:
  TreeBuilder(const JsonLimits& limits, size_t text_bytes) : limits_(limits), text_bytes_(text_bytes) {}

  bool null() { return count() && tree_.null(); }
  bool boolean(bool value) { return count() && tree_.boolean(value); }
  bool number_integer(Json::number_integer_t value) { return count() && tree_.number_integer(value); }
  bool number_unsigned(Json::number_unsigned_t value) { return count() && tree_.number_unsigned(value); }
  bool number_float(Json::number_float_t value, const std::string& text) {
    return count() && tree_.number_float(value, text);
  }
  bool string(std::string& value) {
    bytes_ += value.size();
    return count() && tree_.string(value);
  }
  bool binary(Json::binary_t& value) { return tree_.binary(value); }

  bool start_object(size_t size) { return enter() && count() && tree_.start_object(size); }
  bool start_array(size_t size) { return enter() && count() && tree_.start_array(size); }
  bool key(std::string& name) {
    if (tree_.keys() >= limits_.max_keys) {
      return refuse(fmt::format("too large: an object of it has more than {} keys", limits_.max_keys));
    }
    bytes_ += name.size();
    return tree_.key(name);
  }
  bool end_object() { return tree_.end_object(); }
  bool end_array() { return tree_.end_array(); }
  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception& failure) {
    ended_early_ = position > text_bytes_;
    // Without the library's "[json.exception.parse_error.101] ".
    std::string_view what = failure.what();
    if (const size_t end = what.find("] "); end != std::string_view::npos) what.remove_prefix(end + 2);
    return refuse(fmt::format("not valid JSON: {}", what.substr(0, 300)));
  }

  Json take() { return tree_.take(); }
  // What had come when the text ended; null where something else was wrong.
  Json take_cut() {
    if (!ended_early_) return nullptr;
    tree_.cut();
    return tree_.take();
  }
  Error failure() const { return Error{ErrorCode::kInvalidInput, message_}; }
  size_t bytes() const { return bytes_ + values_ * kValueBytes; }

 private:
  bool refuse(std::string message) {
    if (message_.empty()) message_ = std::move(message);
    return false;
  }
  bool count() {
    if (++values_ <= limits_.max_values) return true;
    return refuse(fmt::format("too large: it has more than {} values", limits_.max_values));
  }
  bool enter() {
    if (tree_.depth() < static_cast<size_t>(limits_.max_depth)) return true;
    return refuse(fmt::format("nested deeper than {} levels", limits_.max_depth));
  }

  const JsonLimits& limits_;
  const size_t text_bytes_;
  JsonTree<Json> tree_;
  size_t values_ = 0;
  size_t bytes_ = 0;
  bool ended_early_ = false;
  std::string message_;
};

}  // namespace

Result<Json> parse_json(std::string_view text, const JsonLimits& limits, const std::stop_token& stop, size_t* bytes) {
  // JSON has none, and the library takes one for the text's end, whatever comes behind it.
  if (const size_t zero = text.find('\0'); zero != std::string_view::npos) {
    return error(ErrorCode::kInvalidInput, "not valid JSON: byte {} is 0", zero + 1);
  }
  try {
    TreeBuilder builder(limits, text.size());
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

Json parse_cut_json(std::string_view text) {
  const JsonLimits limits;
  TreeBuilder builder(limits, text.size());
  return Json::sax_parse(text, &builder) ? builder.take() : builder.take_cut();
}

}  // namespace nfp::server
