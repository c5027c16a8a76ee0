#include "server/grammar/grammar_host.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "base/log.h"
#include "server/grammar/grammar_worker.h"

namespace nfp::server {
namespace {

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
  if (fork_first()) return ok_status();
  return error(ErrorCode::kResource, "no process for grammars can be started: {}", std::strerror(errno));
}

ProcessHost::~ProcessHost() {
  first_.reset();
  holder_.reset();
  if (pid_ < 0) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

bool ProcessHost::fork_first() {
  auto pair = socket_pair();
  if (!pair) return false;
  const pid_t pid = fork();
  if (pid < 0) return false;
  if (pid == 0) grammar_worker_main(pair->second.get());  // closes what else it has inherited
  if (pid_ >= 0) waitpid(pid_, nullptr, 0);               // its channel is closed, so it has ended
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
    // The first one is best forked before the server has threads and a model, and does so little that it hardly ever
    // ends. If it has, a copy of the whole server must do, whose pages nobody touches.
    if ((!first_ || !connected(first_.get())) && !fork_first()) break;
    make_holder(vocabulary);
  }
  return std::nullopt;
}

bool ProcessHost::alive() {
  const std::lock_guard lock(mutex_);
  return holder_ && connected(holder_.get());
}

Result<std::unique_ptr<GrammarHost>> start_grammar_host() {
  auto host = std::make_unique<ProcessHost>();
  NFP_RETURN_IF_ERROR(host->start());
  return std::unique_ptr<GrammarHost>(std::move(host));
}

}  // namespace nfp::server
