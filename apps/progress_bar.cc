#include "progress_bar.h"

#include <fmt/format.h>
#include <unistd.h>

#include <string>

#include "status_line.h"

namespace nfp {

ProgressBar::ProgressBar() : terminal_(takes_escapes(STDERR_FILENO)) {}

ProgressBar::~ProgressBar() {
  if (drawn_) clear_status_line();
}

ProgressCallback ProgressBar::callback() {
  if (!terminal_) return {};
  return [this](const Progress& progress) {
    const int percent = progress.total > 0 ? static_cast<int>(progress.done * 100 / progress.total) : 0;
    if (percent == last_percent_) return;
    last_percent_ = percent;
    drawn_ = true;
    const auto filled = static_cast<size_t>(percent / 4);
    draw_status_line(
        fmt::format("{} [{}{}] {}%", progress.what, std::string(filled, '#'), std::string(25 - filled, '.'), percent));
  };
}

}  // namespace nfp
