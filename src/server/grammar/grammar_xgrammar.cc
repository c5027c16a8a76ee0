#include "server/grammar/grammar.h"

#include <poll.h>

#include <algorithm>
#include <list>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "base/cpu_topology.h"
#include "server/grammar/grammar_constraint.h"
#include "server/grammar/grammar_ebnf.h"
#include "server/grammar/grammar_host.h"
#include "server/grammar/grammar_wire.h"

namespace nfp::server {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int32_t kMaxCompiling = 16;
constexpr auto kTick = std::chrono::milliseconds(5);
constexpr auto kTurn = std::chrono::milliseconds(50);
constexpr uint64_t kProcessBytes = 2u << 20;  // about what a grammar's process takes beside the grammar

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
      return {WireGrammar::kEbnf, ebnf_for_grammar(spec.text)};
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
  using Entry = std::pair<std::string, std::shared_ptr<const GrammarProcess>>;

 public:
  Cache(uint64_t most, std::atomic<uint64_t>* bytes) : most_(most), bytes_(*bytes) {}

  // Not one whose process has ended.
  std::shared_ptr<const GrammarProcess> find(const std::string& key) {
    std::list<Entry> dropped;
    const std::lock_guard lock(mutex_);
    const auto place = places_.find(key);
    if (place == places_.end()) return nullptr;
    entries_.splice(entries_.begin(), entries_, place->second);
    if (!entries_.front().second->alive()) {
      take_out(entries_.begin(), dropped);
      return nullptr;
    }
    return entries_.front().second;
  }

  void add(const std::string& key, std::shared_ptr<const GrammarProcess> process) {
    std::list<Entry> dropped;  // their processes end outside of the lock
    const std::lock_guard lock(mutex_);
    if (places_.contains(key) || size_of(key, *process) > most_) return;
    bytes_ += size_of(key, *process);
    entries_.emplace_front(key, std::move(process));
    places_[key] = entries_.begin();
    while (bytes_ > most_) take_out(std::prev(entries_.end()), dropped);
  }

 private:
  static uint64_t size_of(const std::string& key, const GrammarProcess& process) {
    return process.bytes + 2 * key.size() + kProcessBytes;
  }
  void take_out(std::list<Entry>::iterator entry, std::list<Entry>& dropped) {
    bytes_ -= size_of(entry->first, *entry->second);
    places_.erase(entry->first);
    dropped.splice(dropped.begin(), entries_, entry);
  }
  const uint64_t most_;
  std::atomic<uint64_t>& bytes_;
  std::mutex mutex_;
  std::list<Entry> entries_;  // used last first
  std::unordered_map<std::string, std::list<Entry>::iterator> places_;
};

// Who may begin to compile: few at once, each until it has given way (grammar_worker.cc) or is done.
class Turns {
 public:
  // Waits for a turn; false when `stop` came first.
  bool take(const std::string& key, const std::stop_token& stop) {
    for (;; std::this_thread::sleep_for(kTick)) {
      if (stop.stop_requested()) return false;
      const std::lock_guard lock(mutex_);
      std::erase_if(taken_, [](const auto& turn) { return Clock::now() - turn.second > kTurn; });
      if (taken_.size() >= most_) continue;
      taken_.emplace_back(key, Clock::now());
      return true;
    }
  }
  void give(const std::string& key) {
    const std::lock_guard lock(mutex_);
    std::erase_if(taken_, [&](const auto& turn) { return turn.first == key; });
  }

 private:
  const size_t most_ = static_cast<size_t>(std::max(1, usable_cpu_count() / 4));
  std::mutex mutex_;
  std::vector<std::pair<std::string, Clock::time_point>> taken_;
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
  XgrammarCompiler(GrammarVocabulary vocabulary, std::unique_ptr<ProcessHost> host, GrammarLimits limits)
      : vocabulary_(std::move(vocabulary)),
        host_(std::move(host)),
        limits_(limits),
        cache_(limits.cache_bytes, &stats_.cached_bytes) {}

  Compiled find(const GrammarSpec& spec) override {
    auto process = cache_.find(source_of(spec).key());
    if (!process) return nullptr;
    ++stats_.hits;
    return std::make_shared<ProcessCompiled>(std::move(process), spec.param, vocabulary_.size);
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
          return Compiled(std::make_shared<ProcessCompiled>(std::move(process), spec.param, vocabulary_.size));
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
    Result<std::shared_ptr<const GrammarProcess>> made(nullptr);
    if (turns_.take(key, stop)) {
      const auto begin = Clock::now();
      made = run(spec, source, stop, begin);
      stats_.compile_seconds.observe(std::chrono::duration<double>(Clock::now() - begin).count());
      turns_.give(key);
    } else {
      made = cancelled();
    }
    --stats_.compiling;
    if (made.ok()) cache_.add(key, *made);
    {
      const std::lock_guard lock(mutex_);
      std::erase(compiling_, key);
    }
    if (!made.ok()) return made.error();
    return Compiled(std::make_shared<ProcessCompiled>(std::move(*made), spec.param, vocabulary_.size));
  }

  const GrammarStats& stats() const override { return stats_; }

 private:
  static double seconds(std::chrono::milliseconds time) { return std::chrono::duration<double>(time).count(); }

  Error cancelled() {
    ++stats_.cancelled;
    return Error{ErrorCode::kCancelled, "the grammar is no longer wanted"};
  }

  // A new grammar's process, at work.
  std::optional<Fd> ask(const Source& source) {
    std::optional<Fd> socket = host_->compile(vocabulary_, &stats_.restarts);
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
      return std::nullopt;
    }
    return socket;
  }

  // Until it answers or has ended. Returning closes the socket, which ends the process.
  Status wait(int socket, const GrammarSpec& spec, const std::stop_token& stop, Clock::time_point begin) {
    for (;;) {
      pollfd peer{socket, POLLIN, 0};
      if (poll(&peer, 1, static_cast<int>(kTick.count())) > 0) return ok_status();
      if (stop.stop_requested()) return cancelled();
      const auto spent = Clock::now() - begin;
      if (spent > limits_.compile_share && waiting_ > 0) {
        ++stats_.refused_busy;
        return error(ErrorCode::kResource, "'{}' had {} s to be compiled and was stopped, as others wait; simplify it",
                     spec.param, seconds(limits_.compile_share));
      }
      if (const auto most = limits_.compile_time + limits_.compile_patience; spent > most) {
        ++stats_.refused_busy;
        return error(ErrorCode::kResource,
                     "'{}' is not compiled after {} s, in which it had less than {} s of a CPU: the machine is too "
                     "busy; try again later",
                     spec.param, seconds(most), seconds(limits_.compile_time));
      }
    }
  }

  Error too_slow(const GrammarSpec& spec) {
    ++stats_.refused_time;
    return error(ErrorCode::kInvalidInput, "'{}' takes longer than {} s of a CPU to be compiled; simplify it",
                 spec.param, seconds(limits_.compile_time));
  }

  Error no_process() {
    ++stats_.refused_failed;
    return Error{ErrorCode::kResource, kNoProcessForGrammar};
  }

  // Whether the process that makes others has ended too. Both may be killed at once, and this one be gone first.
  bool host_ends() const {
    constexpr int kLooks = 20;
    for (int look = 0; look < kLooks && host_->alive(); ++look)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    return !host_->alive();
  }

  Result<std::shared_ptr<const GrammarProcess>> run(const GrammarSpec& spec, const Source& source,
                                                    const std::stop_token& stop, Clock::time_point begin) {
    constexpr int kTries = 4;  // the processes above the compiling one may be seen to be gone one by one
    for (int tries = 1;; ++tries) {
      std::optional<Fd> socket = ask(source);
      const bool asked = socket.has_value();
      Reply reply;
      if (socket) {
        NFP_RETURN_IF_ERROR(wait(socket->get(), spec, stop, begin));
        if (!receive_all(socket->get(), &reply, sizeof(reply))) socket.reset();
      }
      if (!socket) {
        // Where the process that should have made this one has ended, nothing is said about the grammar.
        if (tries < kTries && host_ends()) continue;
        if (!asked) return no_process();
        ++stats_.refused_failed;
        return error(ErrorCode::kInvalidInput,
                     "'{}' cannot be compiled: it needs too much memory or is nested too deeply", spec.param);
      }
      if (reply.status == WireStatus::kNoProcess) return no_process();
      if (reply.status == WireStatus::kTooSlow) return too_slow(spec);
      if (reply.status == WireStatus::kRefused) {
        std::string text(reply.size, '\0');
        (void)receive_all(socket->get(), text.data(), text.size());
        ++stats_.refused_invalid;
        return error(ErrorCode::kInvalidInput, "'{}' cannot be compiled: {}", spec.param, text);
      }
      return std::shared_ptr<const GrammarProcess>(
          std::make_shared<GrammarProcess>(std::move(*socket), reply.size, &stats_));
    }
  }

  const GrammarVocabulary vocabulary_;
  const std::unique_ptr<ProcessHost> host_;
  const GrammarLimits limits_;
  GrammarStats stats_;
  Cache cache_;
  Turns turns_;
  std::mutex mutex_;
  std::vector<std::string> compiling_;
  std::atomic<int32_t> waiting_{0};  // for a place among the compiling
};

}  // namespace

bool grammars_available() { return true; }

std::unique_ptr<GrammarCompiler> make_grammar_compiler(std::shared_ptr<const Tokenizer> tokenizer, int32_t vocab,
                                                       std::span<const int32_t> end_ids,
                                                       std::unique_ptr<GrammarHost> host, GrammarLimits limits) {
  std::unique_ptr<ProcessHost> ours(static_cast<ProcessHost*>(host.release()));
  if (!ours) ours = std::make_unique<ProcessHost>();
  return std::make_unique<XgrammarCompiler>(
      GrammarVocabulary{std::move(tokenizer), vocab, {end_ids.begin(), end_ids.end()}}, std::move(ours), limits);
}

}  // namespace nfp::server
