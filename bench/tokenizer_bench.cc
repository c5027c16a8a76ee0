// Times the tokenizer on one thread: encode of a text as one string and by lines, decode, and loading, in processor
// time. Prints one JSON object; tokenizer_bench.py runs it beside the `tokenizers` package on the same files.
//
//   tokenizer_bench TOKENIZER.json TEXT.txt [ROUNDS]
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer.h"

namespace {

std::optional<std::string> read_file(const char* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

// Lines with their newlines, as Python's splitlines(keepends=True) gives them for '\n'.
std::vector<std::string_view> lines_of(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size() - 1) + 1;
    lines.push_back(text.substr(0, end));
    text.remove_prefix(end);
  }
  return lines;
}

// Processor time of this process: what else the machine does is not in it.
double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// Seconds of processor time of each of `rounds` calls.
template <typename Work>
std::string times(int rounds, Work&& work) {
  std::string list;
  for (int i = 0; i < rounds; ++i) {
    const double start = cpu_seconds();
    work();
    list += fmt::format("{}{:.6f}", i == 0 ? "" : ", ", cpu_seconds() - start);
  }
  return "[" + list + "]";
}

int fail(std::string_view message) {
  fmt::print(stderr, "{}\n", message);
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return fail("usage: tokenizer_bench TOKENIZER.json TEXT.txt [ROUNDS]");
  const int rounds = argc > 3 ? std::max(1, std::atoi(argv[3])) : 5;
  const auto json = read_file(argv[1]);
  const auto text = read_file(argv[2]);
  if (!json || !text) return fail("cannot read the tokenizer or the text");

  auto loaded = nfp::Tokenizer::from_json({*json, {}, {}}, argv[1]);
  if (!loaded.ok()) return fail(loaded.error().message);
  const nfp::Tokenizer& tokenizer = **loaded;
  const std::vector<std::string_view> lines = lines_of(*text);
  std::vector<int32_t> ids;
  size_t line_tokens = 0;
  nfp::Status status;
  const auto encode = [&](std::string_view part) {
    auto result = tokenizer.encode(part, {.add_special_tokens = false});
    if (!result.ok()) {
      status = result.error();
      return std::vector<int32_t>();
    }
    return std::move(result).value();
  };

  const std::string whole = times(rounds, [&] { ids = encode(*text); });
  const std::string by_lines = times(rounds, [&] {
    line_tokens = 0;
    for (const std::string_view line : lines) line_tokens += encode(line).size();
  });
  size_t decoded = 0;
  const std::string decode = times(rounds, [&] { decoded = tokenizer.decode(ids).size(); });
  const std::string load = times(rounds, [&] { loaded = nfp::Tokenizer::from_json({*json, {}, {}}, argv[1]); });
  if (!status.ok()) return fail(status.error().message);
  fmt::print(
      "{{\"tokens\": {}, \"line_tokens\": {}, \"lines\": {}, \"decoded_bytes\": {}, \"encode_whole_s\": {}, "
      "\"encode_lines_s\": {}, \"decode_s\": {}, \"load_s\": {}}}\n",
      ids.size(), line_tokens, lines.size(), decoded, whole, by_lines, decode, load);
  return 0;
}
