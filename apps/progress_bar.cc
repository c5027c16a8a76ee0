#include "progress_bar.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <string>

#include "base/log.h"

namespace nfp {

ProgressBar::ProgressBar() : terminal_(::isatty(STDERR_FILENO) != 0) {}

ProgressBar::~ProgressBar() {
  if (drawn_) log::say("\r\033[K");
}

ProgressCallback ProgressBar::callback() {
  if (!terminal_) return {};
  return [this](const Progress& progress) {
    const int percent = progress.total > 0 ? static_cast<int>(progress.done * 100 / progress.total) : 0;
    if (percent == last_percent_) return;
    last_percent_ = percent;
    drawn_ = true;
    const auto filled = static_cast<size_t>(percent / 4);
    log::say("\r\033[K{} [{}{}] {}%", progress.what, std::string(filled, '#'), std::string(25 - filled, '.'), percent);
    std::fflush(stderr);
  };
}

}  // namespace nfp
