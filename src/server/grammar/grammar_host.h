// The server's ends of the processes of grammar_worker.h that are there once: the first one, and the one that holds the
// vocabulary. Either is started again where it has ended; what was forked from it before lives on.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/fd.h"
#include "server/grammar/grammar.h"
#include "text/tokenizer.h"

namespace nfp::server {

struct GrammarVocabulary {
  std::shared_ptr<const Tokenizer> tokenizer;
  int32_t size = 0;  // logits
  std::vector<int32_t> end_ids;
};

class ProcessHost final : public GrammarHost {
 public:
  ProcessHost() = default;  // starts them when the first grammar comes
  ~ProcessHost() override;
  // Starts the first process.
  Status start();

  // The socket of a new grammar's process; nothing where none can be had. From any thread. Indexing the vocabulary
  // takes a moment, so it waits for the first call. `restarts` counts processes that had ended and were started again.
  std::optional<Fd> compile(const GrammarVocabulary& vocabulary, std::atomic<uint64_t>* restarts);
  // Whether the process that the last compile() asked still lives.
  bool alive();

 private:
  bool make_first();
  bool make_holder(const GrammarVocabulary& vocabulary);

  std::mutex mutex_;
  pid_t pid_ = -1;
  Fd first_;   // channel to the first process
  Fd holder_;  // to the one with the vocabulary; none before the first grammar
};

}  // namespace nfp::server
