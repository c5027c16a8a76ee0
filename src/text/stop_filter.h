// Finds stop strings in streamed text. Text that may be the beginning of a stop string is held back until it is clear.
// The result does not depend on how the text was cut into parts.
//
//   StopFilter filter({"\n\n", "User:"});
//   std::string safe = filter.feed(part);     // may be empty
//   if (filter.stopped()) ...                 // text before the stop string has been returned; the rest is dropped
//   else at the end: safe = filter.finish();
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace nfp {

class StopFilter {
 public:
  // Empty strings are ignored. `include_stop`: the stop string itself is returned too.
  explicit StopFilter(std::vector<std::string> stops, bool include_stop = false);

  // Text that is safe to show. The stop string that is complete first ends the text; of several that end at the same
  // byte, the longest. After that everything fed is dropped. `may_stop` false: none that is complete in this part
  // counts; one that only begins in it may.
  std::string feed(std::string_view text, bool may_stop = true);
  // What was held back: it was no stop string after all.
  std::string finish();

  bool stopped() const { return stopped_ >= 0; }
  // The stop string that was found; precondition: stopped().
  const std::string& stop() const { return stops_[static_cast<size_t>(stopped_)].text; }

 private:
  // Knuth-Morris-Pratt: after each byte, `matched` is the length of the longest suffix of the text that begins `text`.
  struct Stop {
    std::string text;
    std::vector<size_t> fallback;  // [text.size()]: longest proper border of text[0..i]
    size_t matched = 0;
  };

  std::vector<Stop> stops_;
  bool include_stop_;
  int stopped_ = -1;
  std::string held_;
};

}  // namespace nfp
