#include "server/grammar/grammar_host.h"

#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

#include "base/log.h"
#include "server/grammar/grammar_wire.h"
#include "server/grammar/grammar_worker.h"

namespace nfp::server {
namespace {

constexpr int kChannel = 3;  // of the first process, since it was started
char process_name[] = "nestedfp-grammar";
std::atomic<bool> main_asks{false};  // whether this program's main() calls run_as_grammar_process()

// The loader's and the sanitizers' variables. Others may hold keys, which a grammar's process has no use for.
std::vector<char*> environment_for_grammars() {
  std::vector<char*> kept;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view name = std::string_view(*entry).substr(0, std::string_view(*entry).find('='));
    if (name.starts_with("LD_") || name.ends_with("SAN_OPTIONS") || name == "GLIBC_TUNABLES") kept.push_back(*entry);
  }
  kept.push_back(nullptr);
  return kept;
}

// This program again, as the first process. Not a copy of this one: whoever copies a process with threads may copy
// locks that are held and never released, and one that holds a model's page tables is slow to copy. -1 and errno where
// it fails.
pid_t start_first(int channel) {
  posix_spawn_file_actions_t files;
  posix_spawnattr_t attributes;
  sigset_t all;
  sigfillset(&all);
  if (posix_spawn_file_actions_init(&files) != 0) return -1;
  if (posix_spawnattr_init(&attributes) != 0) {
    posix_spawn_file_actions_destroy(&files);
    return -1;
  }
  posix_spawn_file_actions_adddup2(&files, channel, kChannel);
  // No signal reaches it before it has said which ones it ignores.
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  posix_spawnattr_setsigmask(&attributes, &all);
  char* arguments[] = {process_name, nullptr};
  const std::vector<char*> environment = environment_for_grammars();
  pid_t pid = -1;
  const int failed = posix_spawn(&pid, "/proc/self/exe", &files, &attributes, arguments, environment.data());
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&files);
  errno = failed;
  return failed == 0 ? pid : -1;
}

bool send_vocabulary(int channel, const GrammarVocabulary& vocabulary) {
  const Tokenizer& tokenizer = *vocabulary.tokenizer;
  std::string data;
  for (int32_t id = 0; id < vocabulary.size; ++id) {
    // Special tokens stay empty: no grammar's text contains them.
    const bool has_text = id < tokenizer.vocab_size() && !tokenizer.is_special(id);
    const std::string_view text = has_text ? tokenizer.token_bytes(id) : std::string_view();
    const auto size = static_cast<uint32_t>(text.size());
    data.append(reinterpret_cast<const char*>(&size), sizeof(size)).append(text);
  }
  VocabularyHead head;
  head.vocab = static_cast<uint32_t>(vocabulary.size);
  head.end_ids = static_cast<uint32_t>(vocabulary.end_ids.size());
  head.bytes = data.size();
  return send_with_fd(channel, kVocabulary, -1, true) && send_all(channel, &head, sizeof(head)) &&
         send_all(channel, vocabulary.end_ids.data(), vocabulary.end_ids.size() * sizeof(int32_t)) &&
         send_all(channel, data.data(), data.size());
}

}  // namespace

Status ProcessHost::start() {
  if (!main_asks) return error(ErrorCode::kUnsupported, "main() does not call run_as_grammar_process()");
  if (make_first()) return ok_status();
  return error(ErrorCode::kResource, "no process for grammars can be started from /proc/self/exe: {}",
               std::strerror(errno));
}

ProcessHost::~ProcessHost() {
  first_.reset();
  holder_.reset();
  if (pid_ < 0) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

bool ProcessHost::make_first() {
  auto pair = socket_pair();
  if (!pair || !main_asks) return false;
  const pid_t pid = start_first(pair->second.get());
  if (pid < 0) return false;
  if (pid_ >= 0) waitpid(pid_, nullptr, 0);  // its channel is closed, so it has ended
  pid_ = pid;
  first_ = std::move(pair->first);
  return true;
}

bool ProcessHost::make_holder(const GrammarVocabulary& vocabulary) {
  holder_.reset();
  auto pair = socket_pair();
  if (!pair || !send_with_fd(first_.get(), kHost, pair->second.get(), true)) return false;
  pair->second.reset();
  if (!send_vocabulary(pair->first.get(), vocabulary)) return false;
  holder_ = std::move(pair->first);
  return true;
}

std::optional<Fd> ProcessHost::compile(const GrammarVocabulary& vocabulary, std::atomic<uint64_t>* restarts) {
  const std::lock_guard lock(mutex_);
  auto pair = socket_pair();
  if (!pair) return std::nullopt;
  for (int tries = 0; tries < 3; ++tries) {
    if (holder_) {
      if (send_with_fd(holder_.get(), kCompile, pair->second.get(), true)) return std::move(pair->first);
      log::warn("a process for grammars has ended; another is started");
      restarts->fetch_add(1, std::memory_order_relaxed);
    }
    if ((!first_ || !connected(first_.get())) && !make_first()) break;
    make_holder(vocabulary);
  }
  return std::nullopt;
}

bool ProcessHost::alive() {
  const std::lock_guard lock(mutex_);
  return holder_ && connected(holder_.get());
}

void run_as_grammar_process(int argc, char** argv) {
  main_asks = true;
  if (argc == 1 && std::string_view(argv[0]) == process_name) grammar_worker_main(kChannel);
}

Result<std::unique_ptr<GrammarHost>> start_grammar_host() {
  auto host = std::make_unique<ProcessHost>();
  NFP_RETURN_IF_ERROR(host->start());
  return std::unique_ptr<GrammarHost>(std::move(host));
}

}  // namespace nfp::server
