#include "text/stop_filter.h"

#include <algorithm>
#include <utility>

namespace nfp {

StopFilter::StopFilter(std::vector<std::string> stops, bool include_stop) : include_stop_(include_stop) {
  for (std::string& text : stops) {
    if (text.empty()) continue;
    Stop stop;
    stop.fallback.assign(text.size(), 0);
    for (size_t i = 1, border = 0; i < text.size(); ++i) {
      while (border > 0 && text[i] != text[border]) border = stop.fallback[border - 1];
      if (text[i] == text[border]) ++border;
      stop.fallback[i] = border;
    }
    stop.text = std::move(text);
    stops_.push_back(std::move(stop));
  }
}

std::string StopFilter::feed(std::string_view text, bool may_stop) {
  if (stopped()) return {};
  if (stops_.empty()) return std::string(text);
  held_.reserve(held_.size() + text.size());
  for (const char c : text) {
    held_ += c;
    size_t longest = 0;
    for (size_t i = 0; i < stops_.size(); ++i) {
      Stop& stop = stops_[i];
      while (stop.matched > 0 && c != stop.text[stop.matched]) stop.matched = stop.fallback[stop.matched - 1];
      if (c == stop.text[stop.matched]) ++stop.matched;
      if (stop.matched < stop.text.size()) continue;
      if (!may_stop) {
        stop.matched = stop.fallback.back();
      } else if (stop.matched > longest) {
        longest = stop.matched;
        stopped_ = static_cast<int>(i);
      }
    }
    if (stopped()) {
      if (!include_stop_) held_.resize(held_.size() - longest);
      return std::exchange(held_, {});
    }
  }
  size_t keep = 0;
  for (const Stop& stop : stops_) keep = std::max(keep, stop.matched);
  std::string safe = held_.substr(0, held_.size() - keep);
  held_.erase(0, held_.size() - keep);
  return safe;
}

std::string StopFilter::finish() {
  for (Stop& stop : stops_) stop.matched = 0;
  return std::exchange(held_, {});
}

}  // namespace nfp
