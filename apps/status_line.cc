#include "status_line.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>

#include "base/log.h"

namespace nfp {

bool takes_escapes(int fd) {
  const char* const terminal = std::getenv("TERM");
  return ::isatty(fd) != 0 && (terminal == nullptr || std::string_view(terminal) != "dumb");
}

void draw_status_line(std::string_view text) {
  winsize size = {};
  if (::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
    // The last column stays free, as some terminals break a line that fills it.
    size_t end = 0;
    for (int columns = 0; end < text.size(); ++end) {
      const bool begins = (text[end] & 0xc0) != 0x80;
      if (begins && ++columns >= size.ws_col) break;
    }
    text = text.substr(0, end);
  }
  log::say("\r\033[K{}", text);
}

void clear_status_line() { log::say("\r\033[K"); }

}  // namespace nfp
