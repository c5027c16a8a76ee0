#include "line_reader.h"

#include <histedit.h>
#include <unistd.h>

#include <cerrno>
#include <clocale>
#include <cstdio>
#include <iostream>

#include "interrupt.h"

namespace nfp {

struct LineReader::Terminal {
  EditLine* edit = nullptr;
  History* history = nullptr;
  HistEvent event = {};
  std::string* prompt = nullptr;

  ~Terminal() {
    if (history != nullptr) history_end(history);
    if (edit != nullptr) el_end(edit);
  }
};

namespace {

constexpr size_t kMaxLine = size_t{16} << 20;  // bytes; no chat template prints more

char* show_prompt(EditLine* edit) {
  void* data = nullptr;
  el_get(edit, EL_CLIENTDATA, &data);
  return static_cast<std::string*>(data)->data();
}

}  // namespace

LineReader::LineReader(std::string prompt) : prompt_(std::move(prompt)) {
  if (::isatty(STDIN_FILENO) == 0) return;
  // libedit leaves out what its locale has no characters for. Text is UTF-8 here, whatever the locale is.
  if (std::setlocale(LC_CTYPE, "C.UTF-8") == nullptr) std::setlocale(LC_CTYPE, "");
  terminal_ = std::make_unique<Terminal>();
  terminal_->edit = el_init("nestedfp", stdin, stdout, stderr);
  terminal_->history = history_init();
  if (terminal_->edit == nullptr || terminal_->history == nullptr) {
    terminal_.reset();
    return;
  }
  ::history(terminal_->history, &terminal_->event, H_SETSIZE, 1000);
  el_set(terminal_->edit, EL_CLIENTDATA, &prompt_);
  el_set(terminal_->edit, EL_PROMPT, show_prompt);
  el_set(terminal_->edit, EL_EDITOR, "emacs");
  el_set(terminal_->edit, EL_HIST, ::history, terminal_->history);
}

LineReader::~LineReader() = default;

Result<std::optional<std::string>> LineReader::next_from_pipe() {
  constexpr int kEnd = std::char_traits<char>::eof();
  std::string line;
  int byte = 0;
  while ((byte = std::cin.rdbuf()->sbumpc()) != kEnd && byte != '\n') {
    if (line.size() == kMaxLine) {
      return error(ErrorCode::kInvalidInput, "standard input: a line is longer than the {} bytes allowed here",
                   kMaxLine);
    }
    line.push_back(std::char_traits<char>::to_char_type(byte));
  }
  if (byte == kEnd && line.empty()) return std::optional<std::string>();
  if (line.ends_with('\r')) line.pop_back();
  return std::optional(std::move(line));
}

Result<std::optional<std::string>> LineReader::next() {
  if (terminal_ == nullptr) return next_from_pipe();
  const InterruptScope interrupt;
  int count = 0;
  const char* text = el_gets(terminal_->edit, &count);
  if (text == nullptr || count <= 0) {
    if (!interrupt.flag()->load()) return std::optional<std::string>();
    std::puts("");
    el_reset(terminal_->edit);
    return std::optional(std::string());
  }
  std::string line(text, static_cast<size_t>(count));
  while (!line.empty() && (line.back() == '\n' || line.back() == '\r')) line.pop_back();
  if (!line.empty()) ::history(terminal_->history, &terminal_->event, H_ENTER, line.c_str());
  return std::optional(std::move(line));
}

}  // namespace nfp
