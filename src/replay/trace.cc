#include "replay/trace.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <ios>
#include <optional>
#include <system_error>

#include "base/csv.h"
#include "base/json_depth.h"
#include "base/mapped_file.h"

namespace nfp {
namespace {

constexpr double kMostSeconds = 1e11;  // year 5138: beyond it the unit is wrong

template <typename Number>
std::optional<Number> number_in(std::string_view text) {
  Number value{};
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (code != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// "2024-05-14 14:00:00.001172+00:00"; a zone other than UTC is refused, as it would shift half a file.
std::optional<double> seconds_of_date(std::string_view text) {
  const auto digits = [&](size_t at, size_t count) -> std::optional<int> {
    if (at + count > text.size()) return std::nullopt;
    return number_in<int>(text.substr(at, count));
  };
  const auto year = digits(0, 4), month = digits(5, 2), day = digits(8, 2);
  const auto hour = digits(11, 2), minute = digits(14, 2), second = digits(17, 2);
  if (!year || !month || !day || !hour || !minute || !second) return std::nullopt;
  if (text[4] != '-' || text[7] != '-' || (text[10] != ' ' && text[10] != 'T') || text[13] != ':' || text[16] != ':') {
    return std::nullopt;
  }
  using namespace std::chrono;
  const year_month_day date{std::chrono::year(*year), std::chrono::month(static_cast<unsigned>(std::max(*month, 0))),
                            std::chrono::day(static_cast<unsigned>(std::max(*day, 0)))};
  if (!date.ok() || *hour < 0 || *hour > 23 || *minute < 0 || *minute > 59 || *second < 0 || *second > 60) {
    return std::nullopt;
  }
  text.remove_prefix(19);
  double fraction = 0;
  if (text.starts_with('.')) {
    size_t end = 1;
    double unit = 0.1;
    for (; end < text.size() && text[end] >= '0' && text[end] <= '9'; ++end, unit /= 10)
      fraction += unit * (text[end] - '0');
    if (end == 1) return std::nullopt;
    text.remove_prefix(end);
  }
  if (!text.empty() && text != "Z" && text != "+00:00") return std::nullopt;
  const auto days = sys_days(date).time_since_epoch().count();
  return static_cast<double>(days) * 86400 + *hour * 3600 + *minute * 60 + *second + fraction;
}

double uniform(uint64_t& state) {  // splitmix64 (Steele et al., OOPSLA 2014)
  uint64_t z = state += 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1.0p-53;
}

class Reader {
 public:
  Reader(std::istream& in, std::string_view where, const TraceLimits& limits)
      : in_(in), where_(where), limits_(limits) {}

  Result<Trace> run() {
    while (next_line()) {
      const std::string_view line = trimmed(line_number_ == 1 ? without_byte_order_mark(line_) : line_);
      if (line.empty()) continue;
      if (trace_.format.empty()) {
        NFP_RETURN_IF_ERROR(start(line));
        if (trace_.format != "mooncake") continue;
      }
      NFP_RETURN_IF_ERROR(trace_.format == "mooncake" ? json_row(line) : csv_row(line));
      if (++rows_ > limits_.most_rows) return fail("the file has more than {} rows", limits_.most_rows);
    }
    if (too_long_) return fail("the line has more than {} bytes", limits_.most_line_bytes);
    if (in_.bad()) return error(ErrorCode::kIo, "{}: cannot be read", where_);
    if (trace_.requests.empty()) {
      return error(ErrorCode::kInvalidInput, "{}: holds no request with a prompt and an answer", where_);
    }
    std::stable_sort(trace_.requests.begin(), trace_.requests.end(),
                     [](const auto& a, const auto& b) { return a.arrival_s < b.arrival_s; });
    const double first = trace_.requests.front().arrival_s;
    for (TraceRequest& request : trace_.requests) request.arrival_s -= first;
    return std::move(trace_);
  }

 private:
  static std::string_view trimmed(std::string_view line) {
    while (!line.empty() && (line.back() == '\r' || line.back() == ' ')) line.remove_suffix(1);
    return line;
  }

  // False at the end, and where a line is longer than any row: getline alone would read gigabytes of a file that has no
  // line ends.
  bool next_line() {
    line_.clear();
    std::streambuf* bytes = in_.rdbuf();
    while (true) {
      const int c = bytes->sbumpc();
      if (c == std::char_traits<char>::eof()) break;
      if (c == '\n') {
        ++line_number_;
        return true;
      }
      line_.push_back(static_cast<char>(c));
      if (line_.size() > limits_.most_line_bytes) {
        ++line_number_;
        too_long_ = true;
        return false;
      }
    }
    if (line_.empty()) return false;
    ++line_number_;
    return true;
  }

  template <typename... Args>
  Error fail(fmt::format_string<Args...> format, Args&&... args) const {
    return error(ErrorCode::kInvalidInput, "{}: line {}: {}", where_, line_number_,
                 fmt::format(format, std::forward<Args>(args)...));
  }

  Status start(std::string_view line) {
    if (line.front() == '{') {
      trace_.format = "mooncake";
      return ok_status();
    }
    const std::vector<std::string_view> names = split_csv(line);
    const auto column = [&](std::string_view name) {
      return static_cast<size_t>(std::find(names.begin(), names.end(), name) - names.begin());
    };
    const auto have = [&](const char* time, const char* input, const char* output) {
      time_ = column(time), input_ = column(input), output_ = column(output);
      return std::max({time_, input_, output_}) < names.size();
    };
    if (have("TIMESTAMP", "ContextTokens", "GeneratedTokens")) {
      trace_.format = "azure";
    } else if (have("Timestamp", "Request tokens", "Response tokens")) {
      trace_.format = "burstgpt";
    } else {
      return fail(
          "must be a header with TIMESTAMP,ContextTokens,GeneratedTokens (Azure) or Timestamp, Request tokens and "
          "Response tokens (BurstGPT), or a JSON object with timestamp, input_length and output_length (Mooncake)");
    }
    columns_ = names.size();
    // In capitals too, as the other columns of these formats have them.
    const auto ours = [&](std::string_view low) {
      const auto same = [](char a, char b) { return (a >= 'A' && a <= 'Z' ? a | 0x20 : a) == b; };
      const auto found = std::find_if(names.begin(), names.end(), [&](std::string_view name) {
        return std::equal(name.begin(), name.end(), low.begin(), low.end(), same);
      });
      return static_cast<size_t>(found - names.begin());
    };
    priority_ = ours("priority"), precision_ = ours("precision");
    return ok_status();
  }

  Status set_priority(int64_t priority) {
    if (priority < INT32_MIN || priority > INT32_MAX) {
      return fail("priority {}: must be from {} to {}", priority, INT32_MIN, INT32_MAX);
    }
    asked_.priority = static_cast<int32_t>(priority);
    return ok_status();
  }
  Status set_precision(std::string_view precision) {
    asked_.precision = precision_class_from_name(precision);
    if (asked_.precision) return ok_status();
    return fail("precision '{}': must be auto, exact or fast", precision);
  }

  Status csv_row(std::string_view line) {
    const std::vector<std::string_view> fields = split_csv(line);
    if (fields.size() != columns_) return fail("has {} columns, and the header {}", fields.size(), columns_);
    const std::string_view time = fields[time_];
    const std::optional<double> seconds = trace_.format == "azure" ? seconds_of_date(time) : number_in<double>(time);
    if (!seconds || !std::isfinite(*seconds)) return fail("'{}' is not a time", time);
    const auto input = number_in<int64_t>(fields[input_]), output = number_in<int64_t>(fields[output_]);
    if (!input || !output) {
      return fail("'{}' and '{}' must be whole numbers of tokens", fields[input_], fields[output_]);
    }
    asked_ = {};
    if (priority_ < columns_ && !fields[priority_].empty()) {
      const auto priority = number_in<int64_t>(fields[priority_]);
      if (!priority) return fail("priority '{}': must be a whole number", fields[priority_]);
      NFP_RETURN_IF_ERROR(set_priority(*priority));
    }
    if (precision_ < columns_ && !fields[precision_].empty()) NFP_RETURN_IF_ERROR(set_precision(fields[precision_]));
    return add(*seconds, *input, *output);
  }

  Status json_row(std::string_view line) {
    const auto json = parse_file_json<nlohmann::json>(line);
    if (!json.is_object()) return fail("is not a JSON object");
    const auto number = [&](const char* name) -> const nlohmann::json* {
      const auto place = json.find(name);
      return place != json.end() && place->is_number() ? &*place : nullptr;
    };
    const auto* time = number("timestamp");
    const auto* input = number("input_length");
    const auto* output = number("output_length");
    if (time == nullptr || input == nullptr || output == nullptr) {
      return fail("timestamp, input_length and output_length must be numbers");
    }
    if (!input->is_number_integer() || !output->is_number_integer()) {
      return fail("input_length and output_length must be whole numbers of tokens");
    }
    const double seconds = time->get<double>() / 1e3;
    if (!std::isfinite(seconds)) return fail("timestamp is not a time");
    asked_ = {};
    if (const auto priority = json.find("priority"); priority != json.end() && !priority->is_null()) {
      if (!priority->is_number_integer()) return fail("priority {}: must be a whole number", priority->dump());
      // Beyond int64_t it would come out negative.
      const bool large = priority->is_number_unsigned() && priority->get<uint64_t>() > INT32_MAX;
      NFP_RETURN_IF_ERROR(set_priority(large ? int64_t{INT32_MAX} + 1 : priority->get<int64_t>()));
    }
    if (const auto precision = json.find("precision"); precision != json.end() && !precision->is_null()) {
      if (!precision->is_string()) return fail("precision: must be auto, exact or fast");
      NFP_RETURN_IF_ERROR(set_precision(precision->get_ref<const std::string&>()));
    }
    return add(seconds, input->get<int64_t>(), output->get<int64_t>());
  }

  // Of a row whose other fields are in `asked_`.
  Status add(double seconds, int64_t input, int64_t output) {
    if (seconds < 0 || seconds > kMostSeconds) return fail("{} is not a time in seconds", seconds);
    if (input < 0 || output < 0 || input > limits_.most_tokens || output > limits_.most_tokens) {
      return fail("{} and {} tokens: must be from 0 to {}", input, output, limits_.most_tokens);
    }
    if (input == 0 || output == 0) {
      ++trace_.skipped;
      return ok_status();
    }
    if (!trace_.requests.empty() && seconds < trace_.requests.back().arrival_s) ++trace_.unsorted;
    asked_.arrival_s = seconds;
    asked_.input = static_cast<int32_t>(input);
    asked_.output = static_cast<int32_t>(output);
    trace_.requests.push_back(asked_);
    return ok_status();
  }

  std::istream& in_;
  const std::string where_;
  const TraceLimits limits_;
  Trace trace_;
  std::string line_;
  int64_t line_number_ = 0, rows_ = 0;
  bool too_long_ = false;
  size_t columns_ = 0, time_ = 0, input_ = 0, output_ = 0;
  size_t priority_ = 0, precision_ = 0;  // columns_: there is none
  TraceRequest asked_;                   // of the row that is being read
};

}  // namespace

Result<Trace> read_trace(std::istream& in, std::string_view where, const TraceLimits& limits) {
  return Reader(in, where, limits).run();
}

Result<Trace> read_trace_file(const std::string& path) {
  // A directory opens like a file, and fails where it is read.
  std::error_code code;
  const auto type = std::filesystem::status(path, code).type();
  using std::filesystem::file_type;
  if (type != file_type::not_found && type != file_type::none && type != file_type::regular &&
      type != file_type::fifo) {
    return error(ErrorCode::kInvalidInput, "{}: is not a file", path);
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) return error(ErrorCode::kNotFound, "{}: cannot be opened", path);
  try {
    return read_trace(file, path);
  } catch (const std::ios_base::failure&) {  // of the buffer, which is read without the stream's own checks
    return error(ErrorCode::kIo, "{}: cannot be read", path);
  }
}

Result<Trace> select(const Trace& trace, const TraceSelection& selection) {
  Trace found;
  found.format = trace.format;
  for (const TraceRequest& request : trace.requests) {
    if (selection.most_tokens > 0 && int64_t{request.input} + request.output > selection.most_tokens) continue;
    found.requests.push_back(request);
  }
  if (found.requests.empty()) {
    return error(ErrorCode::kInvalidInput, "no request of the trace has {} tokens or fewer; raise --max-tokens",
                 selection.most_tokens);
  }
  double speed = selection.speed;
  if (selection.rate > 0) {
    const double own = found.rate() * speed;
    if (!(own > 0) || !std::isfinite(own)) {
      return error(ErrorCode::kInvalidInput,
                   "a trace of {} requests in {} s has no rate that --rate or --find-rate could change",
                   found.requests.size(), found.seconds());
    }
    const double share = selection.rate / own;
    uint64_t random = selection.seed;
    if (share < 1) std::erase_if(found.requests, [&](const TraceRequest&) { return uniform(random) >= share; });
  }
  if (selection.requests > 0 && selection.requests < std::ssize(found.requests)) {
    found.requests.resize(static_cast<size_t>(selection.requests));
  }
  if (found.requests.empty()) {
    return error(ErrorCode::kInvalidInput,
                 "{:g} requests/s keep none of a trace of {}: give a higher --rate, or a longer trace", selection.rate,
                 trace.requests.size());
  }
  const double first = found.requests.front().arrival_s;
  for (TraceRequest& request : found.requests) request.arrival_s -= first;
  // What is left has the rate but for chance (and for the time of the day): the clock makes up for that.
  if (selection.rate > 0 && found.rate() > 0 && std::isfinite(found.rate())) speed = selection.rate / found.rate();
  for (TraceRequest& request : found.requests) request.arrival_s /= speed;
  if (!(found.seconds() <= kMostReplaySeconds)) {
    return error(
        ErrorCode::kInvalidInput,
        "the last request comes after {:g} s, and a replay takes {:g} at most: give a higher --speed or --rate, "
        "or a trace whose times are right",
        found.seconds(), kMostReplaySeconds);
  }
  return found;
}

}  // namespace nfp
