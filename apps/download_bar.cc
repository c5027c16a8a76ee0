#include "download_bar.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cmath>
#include <string>

#include "base/byte_size.h"
#include "base/log.h"
#include "status_line.h"

namespace nfp {
namespace {

std::string time_text(double seconds) {
  const auto whole = std::lround(seconds);
  return whole >= 3600 ? fmt::format("{} h {:02} min", whole / 3600, whole % 3600 / 60)
         : whole >= 60 ? fmt::format("{} min {:02} s", whole / 60, whole % 60)
                       : fmt::format("{} s", whole);
}

}  // namespace

DownloadBar::DownloadBar() : terminal_(takes_escapes(STDERR_FILENO)) {}

DownloadBar::~DownloadBar() {
  if (drawn_ && terminal_) clear_status_line();
}

ProgressCallback DownloadBar::callback() {
  return [this](const Progress& progress) { draw(progress); };
}

void DownloadBar::draw(const Progress& progress) {
  const Clock::time_point now = Clock::now();
  if (progress.total != total_) {  // another set of files
    total_ = progress.total;
    first_ = progress.done;
    began_ = now;
    next_ = now + (terminal_ ? std::chrono::milliseconds(200) : std::chrono::seconds(10));
  }
  if (now < next_) return;
  next_ = now + (terminal_ ? std::chrono::milliseconds(200) : std::chrono::seconds(10));
  drawn_ = true;
  const double seconds = std::chrono::duration<double>(now - began_).count();
  const double speed = static_cast<double>(progress.done - first_) / seconds;  // bytes/s
  std::string line = fmt::format("{} of {}", human_bytes(progress.done), human_bytes(progress.total));
  if (speed > 0) {
    line += fmt::format(", {}/s, {} left", human_bytes(static_cast<uint64_t>(speed)),
                        time_text(static_cast<double>(progress.total - progress.done) / speed));
  }
  if (!terminal_) return log::say("{}\n", line);
  const auto filled = static_cast<size_t>(progress.total > 0 ? progress.done * 25 / progress.total : 0);
  // What is cut off a narrow terminal is the bar.
  draw_status_line(fmt::format("{} [{}{}]", line, std::string(filled, '#'), std::string(25 - filled, '.')));
}

}  // namespace nfp
