#include "server/grammar/grammar_worker.h"

#include <fcntl.h>
#include <malloc.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>
#include <xgrammar/xgrammar.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "server/api/json_schema.h"
#include "server/grammar/grammar_regex.h"
#include "server/grammar/grammar_schema.h"
#include "server/grammar/grammar_wire.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define NFP_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define NFP_SANITIZED 1
#endif
#endif

namespace nfp::server {
namespace {

int64_t clock_us(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return int64_t{now.tv_sec} * 1'000'000 + now.tv_nsec / 1000;
}

// The signal handler looks at these while work is under way. One thread, so plain volatile values will do.
volatile int watched_fd = -1;
volatile int64_t wall_end_us = 0;
volatile int64_t cpu_end_us = 0;

// The server's own threads must not feel what a grammar costs: where every CPU computes, a step is as slow as its
// slowest thread. So the more CPU time a piece of work has had, the further it gives way. What has given way stays so,
// as going back would need privileges. Small grammars are done within the first level.
struct Courtesy {
  int64_t cpu_us;
  int nice;  // beyond the server's
};
using Courtesies = std::array<Courtesy, 2>;
constexpr Courtesies kCompiling = {{{0, 5}, {20'000, 15}}};
constexpr Courtesies kMatching = {{{10'000, 10}, {50'000, 15}}};
constexpr int64_t kTokenUs = 1000;  // of an answer's masks do not count, for each token

int server_nice = 0;
const Courtesies* volatile courtesies = &kCompiling;
volatile int64_t cpu_counted_from_us = 0;
volatile int given_way = 0;

void give_way() {
  const int64_t cpu = clock_us(CLOCK_PROCESS_CPUTIME_ID) - cpu_counted_from_us;
  int nice = given_way;
  for (const Courtesy& level : *courtesies) {
    if (cpu >= level.cpu_us && level.nice > nice) nice = level.nice;
  }
  if (nice == given_way) return;
  given_way = nice;
  setpriority(PRIO_PROCESS, 0, server_nice + nice);  // of this thread, as Linux has it
}

// Only calls that are safe in a signal handler.
void on_tick(int) {
  pollfd peer{watched_fd, 0, 0};
  if (poll(&peer, 1, 0) > 0 && (peer.revents & (POLLHUP | POLLERR | POLLNVAL)) != 0) _exit(0);
  const int64_t cpu = clock_us(CLOCK_PROCESS_CPUTIME_ID);
  if (cpu > cpu_end_us || clock_us(CLOCK_MONOTONIC) > wall_end_us) {
    Reply reply;
    reply.status = WireStatus::kTooSlow;
    (void)!write(watched_fd, &reply, sizeof(reply));
    _exit(0);
  }
  give_way();
}

void set_timer(int interval_us) {
  itimerval timer{};
  timer.it_value.tv_usec = timer.it_interval.tv_usec = interval_us;
  setitimer(ITIMER_REAL, &timer, nullptr);
}

// While one of these lives, the process ends if its peer goes away or its time is up, and gives way by the CPU time
// that it has had, `counted_us` of it before.
class Watch {
 public:
  Watch(int fd, int64_t wall_us, int64_t cpu_us, const Courtesies& levels, int64_t counted_us)
      : cpu_begin_(clock_us(CLOCK_PROCESS_CPUTIME_ID)) {
    watched_fd = fd;
    wall_end_us = clock_us(CLOCK_MONOTONIC) + wall_us;
    cpu_end_us = cpu_begin_ + cpu_us;
    courtesies = &levels;
    cpu_counted_from_us = cpu_begin_ - counted_us;
    give_way();
    set_timer(5000);
  }
  ~Watch() { set_timer(0); }
  int64_t cpu_used_us() const { return clock_us(CLOCK_PROCESS_CPUTIME_ID) - cpu_begin_; }

 private:
  int64_t cpu_begin_;
};

void block_ticks(bool block) {
  sigset_t ticks;
  sigemptyset(&ticks);
  sigaddset(&ticks, SIGALRM);
  pthread_sigmask(block ? SIG_BLOCK : SIG_UNBLOCK, &ticks, nullptr);
}

void limit_memory([[maybe_unused]] uint64_t more) {
#ifndef NFP_SANITIZED  // they reserve more address space than there is memory
  uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const uint64_t most = pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE)) + more;
  const rlimit limit{most, most};
  setrlimit(RLIMIT_AS, &limit);
#endif
  // Where the machine runs out of memory all the same, this is what should go.
  std::ofstream("/proc/self/oom_score_adj") << 1000;
}

std::string read_schema(const std::string& text) {
  const JsonLimits limits{.max_keys = JsonLimits().max_values};  // the request was held to them
  auto read = parse_json(text, limits);
  if (!read.ok()) throw std::runtime_error(read.error().message);
  if (const std::string fault = schema_fault(*read); !fault.empty()) throw std::runtime_error(fault);
  return dump(schema_for_grammar(std::move(*read)));
}

xgrammar::CompiledGrammar compile(const xgrammar::TokenizerInfo& tokens, const CompileHead& head,
                                  const std::string& text) {
  xgrammar::GrammarCompiler compiler(tokens, /*max_threads=*/1, /*cache_enabled=*/false);
  switch (head.kind) {
    case WireGrammar::kRegex:
      return compiler.CompileRegex(regex_for_grammar(text, RegexUse::kAnswer));
    case WireGrammar::kEbnf:
      return compiler.CompileGrammar(text);
    case WireGrammar::kObject:
      // OpenAI's json_object is any JSON object, not any JSON value.
      return compiler.CompileJSONSchema(R"({"type":"object"})", true, std::nullopt, std::nullopt,
                                        /*strict_mode=*/false);
    case WireGrammar::kSchema:
      break;
  }
  return compiler.CompileJSONSchema(read_schema(text), true, std::nullopt, std::nullopt, head.strict_schema != 0);
}

bool any(const std::vector<uint32_t>& mask) {
  return std::any_of(mask.begin(), mask.end(), [](uint32_t word) { return word != 0; });
}

bool fill(xgrammar::GrammarMatcher& matcher, std::vector<uint32_t>& mask) {
  int64_t shape = static_cast<int64_t>(mask.size());
  DLTensor tensor{};
  tensor.data = mask.data();
  tensor.device = {kDLCPU, 0};
  tensor.ndim = 1;
  tensor.dtype = xgrammar::GetBitmaskDLType();
  tensor.shape = &shape;
  return matcher.FillNextTokenBitmask(&tensor);
}

// One answer: a mask, a token, a mask, a token, ...
[[noreturn]] void matcher_main(const xgrammar::CompiledGrammar& grammar, int32_t vocab, const CompileHead& head,
                               int fd) {
  const int64_t burst = int64_t{head.token_burst_ms} * 1000;
  int64_t allowance = burst;  // CPU microseconds
  int64_t counted = 0;        // the same, of the masks so far, less what is free
  std::vector<uint32_t> mask(static_cast<size_t>(xgrammar::GetBitmaskSize(vocab)));
  std::optional<xgrammar::GrammarMatcher> matcher;
  int32_t token = -1;
  for (bool first = true;; first = false) {
    Reply reply;
    reply.status = WireStatus::kAll;
    {
      const Watch watch(fd, /*wall_us=*/60'000'000, allowance, kMatching, counted);
      try {
        if (first) matcher.emplace(grammar);
        if (!first && !matcher->IsTerminated() && !matcher->AcceptToken(token)) {
          reply.status = WireStatus::kRefused;
        } else if (!matcher->IsTerminated()) {
          if (fill(*matcher, mask)) reply.status = any(mask) ? WireStatus::kOk : WireStatus::kRefused;
        }
      } catch (const std::exception&) {
        reply.status = WireStatus::kRefused;
      }
      const int64_t used = watch.cpu_used_us();
      allowance = std::min(burst, allowance - used + int64_t{head.token_refill_us});
      counted = std::max<int64_t>(0, counted + used - kTokenUs);
    }
    if (reply.status == WireStatus::kOk) reply.size = mask.size() * sizeof(uint32_t);
    if (!send_all(fd, &reply, sizeof(reply)) || !send_all(fd, mask.data(), reply.size)) _exit(0);
    if (reply.status == WireStatus::kRefused || !receive_all(fd, &token, sizeof(token))) _exit(0);
    if (allowance <= 0) {
      reply = Reply{WireStatus::kTooSlow, 0, 0};
      send_all(fd, &reply, sizeof(reply));
      _exit(0);
    }
  }
}

// xgrammar writes "[12:34:56] /path/file.cc:123: message".
std::string explanation(const std::exception& failure) {
  std::string_view what = failure.what();
  if (const size_t place = what.find(".cc:"); place != std::string_view::npos) {
    if (const size_t text = what.find(": ", place); text != std::string_view::npos) what.remove_prefix(text + 2);
  }
  while (!what.empty() && (what.back() == '\n' || what.back() == ' ')) what.remove_suffix(1);
  return std::string(what.substr(0, 300));
}

// To who waits for the process that was to have the other end.
void tell_there_is_none(int socket) {
  const Reply reply{WireStatus::kNoProcess, 0, 0};
  send_all(socket, &reply, sizeof(reply));
}

[[noreturn]] void grammar_main(const xgrammar::TokenizerInfo& tokens, int32_t vocab, int fd) {
  CompileHead head;
  if (!receive_all(fd, &head, sizeof(head))) _exit(0);
  std::string text(head.text_bytes, '\0');
  if (!receive_all(fd, text.data(), text.size())) _exit(0);
  limit_memory(head.memory_bytes);
  std::optional<xgrammar::CompiledGrammar> grammar;
  std::string refusal;
  // On a thread, as giving way is a thread's: the answers' processes, copies of this one, start as the server is.
  block_ticks(true);
  const auto work = [&] {
    // By the clock its peer limits it, by going away.
    const Watch watch(fd, /*wall_us=*/INT64_MAX / 2, int64_t{head.compile_ms} * 1000, kCompiling, 0);
    block_ticks(false);
    try {
      grammar.emplace(compile(tokens, head, text));
      // A rule that is nothing but itself compiles, and then allows no first token.
      xgrammar::GrammarMatcher matcher(*grammar);
      std::vector<uint32_t> mask(static_cast<size_t>(xgrammar::GetBitmaskSize(vocab)));
      if (fill(matcher, mask) && !any(mask)) {
        refusal = "no text satisfies it";
        grammar.reset();
      }
    } catch (const std::bad_alloc&) {
      refusal = "it needs too much memory";
    } catch (const std::exception& failure) {
      refusal = explanation(failure);
      if (refusal.empty()) refusal = "it is not understood";
    }
  };
  try {
    std::thread(work).join();
  } catch (const std::system_error&) {
    tell_there_is_none(fd);
    _exit(0);
  }
  block_ticks(false);
  given_way = 0;
  Reply reply;
  reply.status = grammar ? WireStatus::kOk : WireStatus::kRefused;
  reply.size = grammar ? grammar->MemorySizeBytes() : refusal.size();
  if (!send_all(fd, &reply, sizeof(reply)) || !grammar) {
    send_all(fd, refusal.data(), refusal.size());
    _exit(0);
  }
  while (auto message = receive_with_fd(fd)) {
    if (message->first != kMatch || !message->second) continue;
    const pid_t made = fork();
    if (made == 0) {
      close(fd);
      matcher_main(*grammar, vocab, head, message->second.get());
    }
    if (made < 0) tell_there_is_none(message->second.get());
  }
  _exit(0);
}

std::optional<std::pair<xgrammar::TokenizerInfo, int32_t>> read_vocabulary(int channel) {
  VocabularyHead head;
  if (!receive_all(channel, &head, sizeof(head))) return std::nullopt;
  std::vector<int32_t> end_ids(head.end_ids);
  if (!receive_all(channel, end_ids.data(), end_ids.size() * sizeof(int32_t))) return std::nullopt;
  std::string data(head.bytes, '\0');
  if (!receive_all(channel, data.data(), data.size())) return std::nullopt;
  std::vector<std::string> vocab(head.vocab);
  size_t at = 0;
  for (std::string& token : vocab) {
    uint32_t size = 0;
    if (at + sizeof(size) > data.size()) break;
    std::memcpy(&size, data.data() + at, sizeof(size));
    at += sizeof(size);
    token = data.substr(at, size);
    at += size;
  }
  const auto count = static_cast<int32_t>(head.vocab);
  return std::pair(xgrammar::TokenizerInfo(vocab, xgrammar::VocabType::RAW, count, end_ids), count);
}

// Holds the vocabulary, and makes a process for each grammar.
[[noreturn]] void host_main(int channel) {
  std::optional<std::pair<xgrammar::TokenizerInfo, int32_t>> vocabulary;
  while (auto message = receive_with_fd(channel)) {
    if (message->first == kVocabulary) {
      vocabulary = read_vocabulary(channel);
      if (!vocabulary) break;
    } else if (message->first == kCompile && message->second && vocabulary) {
      const pid_t made = fork();
      if (made == 0) {
        close(channel);
        grammar_main(vocabulary->first, vocabulary->second, message->second.get());
      }
      if (made < 0) tell_there_is_none(message->second.get());
    }
  }
  _exit(0);
}

// Linux before 5.9 has no call for it.
void close_above(int last) {
  if (close_range(static_cast<unsigned>(last) + 1, ~0u, 0) == 0) return;
  std::vector<int> open;
  std::error_code failed;
  for (std::filesystem::directory_iterator at("/proc/self/fd", failed), end; !failed && at != end;
       at.increment(failed)) {
    open.push_back(std::atoi(at->path().filename().c_str()));
  }
  for (const int fd : open) {
    if (fd > last) close(fd);
  }
}

}  // namespace

void grammar_worker_main(int channel) {
  // Nothing of the server's stays open here: not its port, not its files.
  close_above(channel);
#ifndef NFP_SANITIZED
  // xgrammar has its own log, which clients could fill.
  const int nowhere = open("/dev/null", O_RDWR);
  for (int fd = 0; fd <= 2; ++fd) dup2(nowhere, fd);
  if (nowhere > 2) close(nowhere);
#endif
  prctl(PR_SET_NAME, "nestedfp-gram");
  server_nice = getpriority(PRIO_PROCESS, 0);
  // A real-time policy is for the server's threads.
  const sched_param ordinary{};
  if (sched_getscheduler(0) != SCHED_OTHER) sched_setscheduler(0, SCHED_OTHER, &ordinary);
  mallopt(M_ARENA_MAX, 1);  // a second one would count as memory of a grammar
  // Ended children and grandchildren leave no zombies, also where the server is a container's first process.
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  signal(SIGCHLD, SIG_IGN);
  const rlimit none{0, 0};
  setrlimit(RLIMIT_CORE, &none);
  // Ctrl-C reaches the whole process group; the server decides when these end.
  signal(SIGINT, SIG_IGN);
  signal(SIGTERM, SIG_IGN);
  signal(SIGHUP, SIG_IGN);
  struct sigaction tick {};
  tick.sa_handler = on_tick;
  tick.sa_flags = SA_RESTART;
  sigaction(SIGALRM, &tick, nullptr);
  sigset_t unblocked;
  sigemptyset(&unblocked);
  sigprocmask(SIG_SETMASK, &unblocked, nullptr);

  while (auto message = receive_with_fd(channel)) {
    if (message->first != kHost || !message->second) continue;
    if (fork() == 0) {
      close(channel);
      host_main(message->second.get());
    }
  }
  _exit(0);
}

}  // namespace nfp::server
