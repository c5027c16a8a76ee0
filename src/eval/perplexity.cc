#include "eval/perplexity.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <vector>

#include "eval/logprob_file.h"

namespace nfp {
namespace {

// Mean and standard error of what was added.
class Mean {
 public:
  void add(double value) {
    sum_ += value;
    squares_ += value * value;
    ++count_;
  }
  int64_t count() const { return count_; }
  double mean() const { return count_ > 0 ? sum_ / static_cast<double>(count_) : 0; }
  double error() const {
    if (count_ < 2) return 0;
    const double variance = squares_ / static_cast<double>(count_) - mean() * mean();
    return std::sqrt(std::max(0.0, variance) / static_cast<double>(count_ - 1));
  }

 private:
  double sum_ = 0, squares_ = 0;
  int64_t count_ = 0;
};

uint64_t hash_tokens(std::span<const int32_t> tokens) {  // FNV-1a
  uint64_t hash = 0xcbf29ce484222325ull;
  for (int32_t token : tokens) {
    hash ^= static_cast<uint32_t>(token);
    hash *= 0x100000001b3ull;
  }
  return hash;
}

// Logits become natural log-probabilities, in place. Sums in double: the vocabulary is long.
void log_softmax(std::span<float> row) {
  const float top = *std::max_element(row.begin(), row.end());
  double sum = 0;
  for (float value : row) sum += std::exp(static_cast<double>(value - top));
  const float shift = top + static_cast<float>(std::log(sum));
  for (float& value : row) value -= shift;
}

struct RowScore {
  double nll = 0;
  double kld = 0;
  double base_nll = 0;
  bool same_top = false;
};

void compare(std::span<const float> base, std::span<const float> mine, int32_t target, RowScore& score) {
  double kld = 0, mass = 0;
  size_t base_top = 0, my_top = 0;
  for (size_t v = 0; v < base.size(); ++v) {
    const double p = std::exp(static_cast<double>(base[v]));
    mass += p;
    kld += p * (static_cast<double>(base[v]) - mine[v]);
    if (base[v] > base[base_top]) base_top = v;
    if (mine[v] > mine[my_top]) my_top = v;
  }
  // The saved probabilities are rounded: divide by their sum, so that equal distributions give zero.
  score.kld = kld / mass - std::log(mass);
  score.base_nll = -(static_cast<double>(base[static_cast<size_t>(target)]) - std::log(mass));
  score.same_top = base_top == my_top;
}

double percentile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  const auto at = static_cast<size_t>(share * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(at), values.end());
  return values[at];
}

Status check_base(const LogprobReader& base, const std::string& path, const LogprobHeader& wanted) {
  const LogprobHeader& have = base.header();
  if (have.vocab != wanted.vocab) {
    return error(ErrorCode::kInvalidInput, "{}: was made with a vocabulary of {}, this model has {}", path, have.vocab,
                 wanted.vocab);
  }
  if (have.ctx != wanted.ctx || have.rows_per_chunk != wanted.rows_per_chunk) {
    return error(ErrorCode::kInvalidInput, "{}: was made with --ctx {}; use the same here", path, have.ctx);
  }
  if (have.chunks != wanted.chunks) {
    return error(ErrorCode::kInvalidInput, "{}: holds {} chunks, {} are to be scored; use --chunks {}", path,
                 have.chunks, wanted.chunks, have.chunks);
  }
  if (have.tokens_hash != wanted.tokens_hash) {
    return error(ErrorCode::kInvalidInput, "{}: was made from another text, or with another tokenizer", path);
  }
  return ok_status();
}

}  // namespace

Result<PerplexityResult> perplexity(Model& model, std::span<const int32_t> tokens, const PerplexityOptions& options,
                                    ThreadPool& threads, const PerplexityProgress& progress) {
  const auto ctx = static_cast<size_t>(options.ctx);
  if (options.ctx < 4) return error(ErrorCode::kUsage, "--ctx is {}; it must be at least 4", options.ctx);
  size_t chunks = tokens.size() / ctx;
  if (chunks == 0) {
    return error(ErrorCode::kInvalidInput, "the text has {} tokens, less than one chunk of --ctx {}", tokens.size(),
                 ctx);
  }
  if (options.chunks > 0) chunks = std::min(chunks, static_cast<size_t>(options.chunks));
  const auto vocab = static_cast<size_t>(model.config().vocab);
  const size_t first = ctx / 2;
  const size_t rows = ctx - 1 - first;

  LogprobHeader header;
  header.vocab = static_cast<uint32_t>(vocab);
  header.ctx = static_cast<uint32_t>(ctx);
  header.chunks = chunks;
  header.rows_per_chunk = rows;
  header.tokens_hash = hash_tokens(tokens.first(chunks * ctx));
  std::optional<AtomicFile> save;
  std::optional<LogprobReader> base;
  if (!options.save_base.empty()) {
    NFP_ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::create(options.save_base));
    save.emplace(std::move(file));
    NFP_RETURN_IF_ERROR(save->write(std::as_bytes(std::span(&header, 1))));
  }
  if (!options.kld_base.empty()) {
    NFP_ASSIGN_OR_RETURN(LogprobReader reader, LogprobReader::open(options.kld_base));
    base.emplace(std::move(reader));
    NFP_RETURN_IF_ERROR(check_base(*base, options.kld_base, header));
  }

  NFP_ASSIGN_OR_RETURN(const auto runner,
                       SequenceRunner::create(model, options.ctx, options.max_feed, options.kv_dtype));
  const auto started = std::chrono::steady_clock::now();
  Mean nll, kld, base_nll;
  std::vector<double> klds;
  int64_t same_top = 0;
  std::vector<float> logits(rows * vocab);
  std::vector<RowScore> scores(rows);
  const size_t record_bytes = logprob_record_bytes(header.vocab);
  std::vector<std::byte> records(save ? rows * record_bytes : 0);
  PerplexityResult result;
  for (size_t chunk = 0; chunk < chunks; ++chunk) {
    std::vector<int32_t> part(tokens.begin() + static_cast<std::ptrdiff_t>(chunk * ctx),
                              tokens.begin() + static_cast<std::ptrdiff_t>((chunk + 1) * ctx));
    if (options.bos) part.front() = *options.bos;
    runner->restart();
    const auto feed = static_cast<size_t>(std::max(1, options.max_feed));
    for (size_t done = 0; done < ctx; done += feed) {
      const size_t count = std::min(feed, ctx - done);
      NFP_RETURN_IF_ERROR(
          runner->feed(std::span(part).subspan(done, count), options.precision, {0, -1, options.observer}));
      const size_t from = std::max(done, first);
      const size_t to = std::min(done + count, ctx - 1);
      if (from < to) {
        NFP_RETURN_IF_ERROR(runner->logits(static_cast<int32_t>(from - done), static_cast<int32_t>(to - from),
                                           options.precision, logits.data() + (from - first) * vocab));
      }
    }
    threads.run([&](int thread) {
      std::vector<float> base_row(base ? vocab : 0);
      const Range mine = partition(static_cast<int64_t>(rows), thread, threads.size());
      for (auto i = static_cast<size_t>(mine.begin); i < static_cast<size_t>(mine.end); ++i) {
        const std::span<float> row(logits.data() + i * vocab, vocab);
        log_softmax(row);
        const int32_t target = part[first + i + 1];
        scores[i].nll = -static_cast<double>(row[static_cast<size_t>(target)]);
        if (base) {
          decode_logprobs(base->record(chunk * rows + i), base_row);
          compare(base_row, row, target, scores[i]);
        }
        if (save) encode_logprobs(row, records.data() + i * record_bytes);
      }
    });
    if (save) NFP_RETURN_IF_ERROR(save->write(std::span(records)));
    for (const RowScore& score : scores) {
      nll.add(score.nll);
      if (!base) continue;
      kld.add(score.kld);
      base_nll.add(score.base_nll);
      klds.push_back(score.kld);
      same_top += score.same_top ? 1 : 0;
    }
    result.chunks = static_cast<int64_t>(chunk) + 1;
    result.scored = nll.count();
    result.perplexity = std::exp(nll.mean());
    result.error = result.perplexity * nll.error();
    result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
    if (progress) progress(result, static_cast<int64_t>(chunks));
  }
  if (save) NFP_RETURN_IF_ERROR(save->commit());
  if (base) {
    KldResult& k = result.kld.emplace();
    const auto count = static_cast<double>(klds.size());
    k.mean = kld.mean();
    k.mean_error = kld.error();
    k.median = percentile(klds, 0.5);
    k.p99 = percentile(klds, 0.99);
    k.largest = *std::max_element(klds.begin(), klds.end());
    k.same_top = static_cast<double>(same_top) / count;
    k.same_top_error = std::sqrt(k.same_top * (1 - k.same_top) / std::max(1.0, count - 1));
    k.base_perplexity = std::exp(base_nll.mean());
  }
  return result;
}

}  // namespace nfp
