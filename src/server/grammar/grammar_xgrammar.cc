#include "server/grammar/grammar.h"

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <list>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "base/log.h"
#include "server/grammar/grammar_constraint.h"
#include "server/grammar/grammar_wire.h"
#include "server/grammar/grammar_worker.h"

namespace nfp::server {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int32_t kMaxCompiling = 16;
constexpr auto kTick = std::chrono::milliseconds(5);
constexpr uint64_t kProcessBytes = 2u << 20;  // about what a grammar's process takes beside the grammar

class Host final : public GrammarHost {
 public:
  Host(Fd channel, pid_t pid) : channel_(std::move(channel)), pid_(pid) {}
  ~Host() override {
    channel_.reset();
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }

  // Once, before the first compile.
  bool set_vocabulary(const Tokenizer& tokenizer, int32_t vocab, std::span<const int32_t> end_ids) {
    std::string data;
    for (int32_t id = 0; id < vocab; ++id) {
      // Special tokens stay empty: no grammar's text contains them.
      const bool has_text = id < tokenizer.vocab_size() && !tokenizer.is_special(id);
      const std::string_view text = has_text ? tokenizer.token_bytes(id) : std::string_view();
      const auto size = static_cast<uint32_t>(text.size());
      data.append(reinterpret_cast<const char*>(&size), sizeof(size)).append(text);
    }
    VocabularyHead head;
    head.vocab = static_cast<uint32_t>(vocab);
    head.end_ids = static_cast<uint32_t>(end_ids.size());
    head.bytes = data.size();
    return send_with_fd(channel_.get(), kVocabulary, -1, true) && send_all(channel_.get(), &head, sizeof(head)) &&
           send_all(channel_.get(), end_ids.data(), end_ids.size_bytes()) &&
           send_all(channel_.get(), data.data(), data.size());
  }

  // The socket of a new grammar's process.
  std::optional<Fd> compile() {
    auto pair = socket_pair();
    if (!pair || !send_with_fd(channel_.get(), kCompile, pair->second.get(), true)) return std::nullopt;
    return std::move(pair->first);
  }

 private:
  Fd channel_;
  pid_t pid_;
};

class ProcessCompiled final : public CompiledConstraint {
 public:
  ProcessCompiled(std::shared_ptr<const GrammarProcess> process, std::string param, int32_t vocab)
      : process_(std::move(process)), param_(std::move(param)), vocab_(vocab) {}
  std::unique_ptr<TokenConstraint> instantiate() const override {
    return std::make_unique<ProcessConstraint>(process_, param_, vocab_);
  }

 private:
  std::shared_ptr<const GrammarProcess> process_;
  std::string param_;
  int32_t vocab_;
};

// EBNF of one string literal.
std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<uint8_t>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20 || byte == 0x7F) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  return out + "\"";
}

struct Source {
  WireGrammar kind = WireGrammar::kObject;
  std::string text;
  std::string key() const { return static_cast<char>('0' + static_cast<int>(kind)) + text; }
};

Source source_of(const GrammarSpec& spec) {
  switch (spec.kind) {
    case GrammarSpec::Kind::kJsonSchema:
      return {WireGrammar::kSchema, spec.text};
    case GrammarSpec::Kind::kRegex:
      return {WireGrammar::kRegex, spec.text};
    case GrammarSpec::Kind::kEbnf:
      return {WireGrammar::kEbnf, spec.text};
    case GrammarSpec::Kind::kChoice: {
      std::string ebnf = "root ::= ";
      for (size_t i = 0; i < spec.choices.size(); ++i) ebnf += (i > 0 ? " | " : "") + quoted(spec.choices[i]);
      return {WireGrammar::kEbnf, std::move(ebnf)};
    }
    case GrammarSpec::Kind::kJsonObject:
    case GrammarSpec::Kind::kNone:
      break;
  }
  return {WireGrammar::kObject, ""};
}

// Compiled grammars by their text; those used last stay, up to a number of bytes.
class Cache {
 public:
  Cache(uint64_t most, std::atomic<uint64_t>* bytes) : most_(most), bytes_(*bytes) {}

  std::shared_ptr<const GrammarProcess> find(const std::string& key) {
    const std::lock_guard lock(mutex_);
    const auto place = places_.find(key);
    if (place == places_.end()) return nullptr;
    entries_.splice(entries_.begin(), entries_, place->second);
    return entries_.front().second;
  }

  void add(const std::string& key, std::shared_ptr<const GrammarProcess> process) {
    std::list<Entry> dropped;  // their processes end outside of the lock
    const std::lock_guard lock(mutex_);
    if (places_.contains(key) || size_of(key, *process) > most_) return;
    bytes_ += size_of(key, *process);
    entries_.emplace_front(key, std::move(process));
    places_[key] = entries_.begin();
    while (bytes_ > most_) {
      bytes_ -= size_of(entries_.back().first, *entries_.back().second);
      places_.erase(entries_.back().first);
      dropped.splice(dropped.begin(), entries_, std::prev(entries_.end()));
    }
  }

 private:
  using Entry = std::pair<std::string, std::shared_ptr<const GrammarProcess>>;
  static uint64_t size_of(const std::string& key, const GrammarProcess& process) {
    return process.bytes + 2 * key.size() + kProcessBytes;
  }
  const uint64_t most_;
  std::atomic<uint64_t>& bytes_;
  std::mutex mutex_;
  std::list<Entry> entries_;  // used last first
  std::unordered_map<std::string, std::list<Entry>::iterator> places_;
};

// Counts a thread that waits, from begin() on.
class Waiting {
 public:
  explicit Waiting(std::atomic<int32_t>* count) : count_(*count) {}
  ~Waiting() {
    if (waits_) --count_;
  }
  void begin() {
    if (!std::exchange(waits_, true)) ++count_;
  }

 private:
  std::atomic<int32_t>& count_;
  bool waits_ = false;
};

class XgrammarCompiler final : public GrammarCompiler {
 public:
  XgrammarCompiler(std::shared_ptr<const Tokenizer> tokenizer, int32_t vocab, std::span<const int32_t> end_ids,
                   std::unique_ptr<Host> host, GrammarLimits limits)
      : tokenizer_(std::move(tokenizer)),
        vocab_(vocab),
        end_ids_(end_ids.begin(), end_ids.end()),
        host_(std::move(host)),
        limits_(limits),
        cache_(limits.cache_bytes, &stats_.cached_bytes) {}

  Compiled find(const GrammarSpec& spec) override {
    auto process = cache_.find(source_of(spec).key());
    if (!process) return nullptr;
    ++stats_.hits;
    return std::make_shared<ProcessCompiled>(std::move(process), spec.param, vocab_);
  }

  Result<Compiled> compile(const GrammarSpec& spec, const std::stop_token& stop) override {
    if (spec.kind == GrammarSpec::Kind::kNone) return error(ErrorCode::kInvalidInput, "no grammar is given");
    const Source source = source_of(spec);
    const std::string key = source.key();
    // Whoever asks first for a grammar compiles it; the others wait for that one to end, well or not.
    {
      Waiting waiting(&waiting_);
      for (;; std::this_thread::sleep_for(kTick)) {
        if (auto process = cache_.find(key)) {
          ++stats_.hits;
          return Compiled(std::make_shared<ProcessCompiled>(std::move(process), spec.param, vocab_));
        }
        if (stop.stop_requested()) return cancelled();
        const std::lock_guard lock(mutex_);
        if (std::find(compiling_.begin(), compiling_.end(), key) != compiling_.end()) continue;
        if (static_cast<int32_t>(compiling_.size()) < kMaxCompiling) {
          compiling_.push_back(key);
          break;
        }
        waiting.begin();
      }
    }
    ++stats_.compiling;
    const auto begin = Clock::now();
    auto made = run(spec, source, stop, begin);
    stats_.compile_seconds.observe(std::chrono::duration<double>(Clock::now() - begin).count());
    --stats_.compiling;
    if (made.ok()) cache_.add(key, *made);
    {
      const std::lock_guard lock(mutex_);
      std::erase(compiling_, key);
    }
    if (!made.ok()) return made.error();
    return Compiled(std::make_shared<ProcessCompiled>(std::move(*made), spec.param, vocab_));
  }

  const GrammarStats& stats() const override { return stats_; }

 private:
  Error cancelled() {
    ++stats_.cancelled;
    return Error{ErrorCode::kCancelled, "the grammar is no longer wanted"};
  }

  Result<std::shared_ptr<const GrammarProcess>> run(const GrammarSpec& spec, const Source& source,
                                                    const std::stop_token& stop, Clock::time_point begin) {
    std::optional<Fd> socket = open();
    CompileHead head;
    head.kind = source.kind;
    head.strict_schema = 1;
    head.text_bytes = source.text.size();
    head.compile_ms = static_cast<uint32_t>(limits_.compile_time.count());
    head.token_burst_ms = static_cast<uint32_t>(limits_.token_burst.count());
    head.token_refill_us = static_cast<uint32_t>(limits_.token_mean.count());
    head.memory_bytes = limits_.memory_bytes;
    if (!socket || !send_all(socket->get(), &head, sizeof(head)) ||
        !send_all(socket->get(), source.text.data(), source.text.size())) {
      ++stats_.refused_failed;
      return error(ErrorCode::kResource, "'{}': no process for grammars can be had; try again later", spec.param);
    }
    for (;;) {
      pollfd peer{socket->get(), POLLIN, 0};
      if (poll(&peer, 1, static_cast<int>(kTick.count())) > 0) break;
      // Closing the socket ends the process.
      if (stop.stop_requested()) return cancelled();
      const auto spent = Clock::now() - begin;
      if (spent > limits_.compile_share && waiting_ > 0) {
        ++stats_.refused_busy;
        return error(ErrorCode::kResource, "'{}' had {} s to be compiled and was stopped, as others wait; simplify it",
                     spec.param, std::chrono::duration<double>(limits_.compile_share).count());
      }
      if (spent > limits_.compile_time + std::chrono::seconds(1)) break;
    }
    Reply reply;
    std::string text;
    pollfd peer{socket->get(), POLLIN, 0};
    if (poll(&peer, 1, 0) <= 0) {
      reply.status = WireStatus::kTooSlow;
    } else if (!receive_all(socket->get(), &reply, sizeof(reply))) {
      ++stats_.refused_failed;
      return error(ErrorCode::kInvalidInput,
                   "'{}' cannot be compiled: it needs too much memory or is nested too deeply", spec.param);
    } else if (reply.status == WireStatus::kRefused) {
      text.resize(reply.size);
      (void)receive_all(socket->get(), text.data(), text.size());
      ++stats_.refused_invalid;
      return error(ErrorCode::kInvalidInput, "'{}' cannot be compiled: {}", spec.param, text);
    }
    if (reply.status == WireStatus::kTooSlow) {
      ++stats_.refused_time;
      return error(ErrorCode::kInvalidInput, "'{}' takes longer than {} s to be compiled; simplify it", spec.param,
                   std::chrono::duration<double>(limits_.compile_time).count());
    }
    return std::shared_ptr<const GrammarProcess>(
        std::make_shared<GrammarProcess>(std::move(*socket), reply.size, &stats_));
  }

  // Indexing the vocabulary takes a moment, so it waits for the first grammar.
  std::optional<Fd> open() {
    const std::lock_guard lock(host_mutex_);
    if (!host_) {
      auto started = start_grammar_host();
      if (!started.ok()) return std::nullopt;
      host_.reset(static_cast<Host*>(started->release()));
    }
    if (!described_ && !host_->set_vocabulary(*tokenizer_, vocab_, end_ids_)) {
      log::error("the process for grammars has ended");
      return std::nullopt;
    }
    described_ = true;
    return host_->compile();
  }

  std::shared_ptr<const Tokenizer> tokenizer_;
  int32_t vocab_;
  std::vector<int32_t> end_ids_;
  std::mutex host_mutex_;
  std::unique_ptr<Host> host_;
  bool described_ = false;
  GrammarLimits limits_;
  GrammarStats stats_;
  Cache cache_;
  std::mutex mutex_;
  std::vector<std::string> compiling_;
  std::atomic<int32_t> waiting_{0};  // for a place among the compiling
};

}  // namespace

bool grammars_available() { return true; }

Result<std::unique_ptr<GrammarHost>> start_grammar_host() {
  auto pair = socket_pair();
  const pid_t pid = pair ? fork() : -1;
  if (pid < 0) return error(ErrorCode::kResource, "no process for grammars can be started: {}", std::strerror(errno));
  if (pid == 0) {
    pair->first.reset();
    grammar_worker_main(pair->second.get());
  }
  return std::unique_ptr<GrammarHost>(std::make_unique<Host>(std::move(pair->first), pid));
}

std::unique_ptr<GrammarCompiler> make_grammar_compiler(std::shared_ptr<const Tokenizer> tokenizer, int32_t vocab,
                                                       std::span<const int32_t> end_ids,
                                                       std::unique_ptr<GrammarHost> host, GrammarLimits limits) {
  return std::make_unique<XgrammarCompiler>(std::move(tokenizer), vocab, end_ids,
                                            std::unique_ptr<Host>(static_cast<Host*>(host.release())), limits);
}

}  // namespace nfp::server
