#include "eval/perplexity.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <limits>
#include <system_error>
#include <vector>

#include "base/byte_size.h"
#include "eval/logprob_file.h"
#include "model/overflow.h"

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

double quantile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  const auto at = static_cast<size_t>(share * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(at), values.end());
  return values[at];
}

size_t first_scored(size_t ctx) { return ctx / 2; }

// The chunks of a text that are scored, as a file of their distributions describes them.
struct Chunks {
  LogprobHeader header;
  size_t available = 0;  // chunks that the whole text has
};

Result<Chunks> cut_chunks(int32_t vocab, std::span<const int32_t> tokens, const PerplexityOptions& options) {
  if (options.ctx < 4) return error(ErrorCode::kUsage, "--ctx is {}; it must be at least 4", options.ctx);
  const auto ctx = static_cast<size_t>(options.ctx);
  Chunks cut;
  cut.available = tokens.size() / ctx;
  if (cut.available == 0) {
    return error(ErrorCode::kInvalidInput, "the text has {} tokens, less than one chunk of --ctx {}", tokens.size(),
                 ctx);
  }
  LogprobHeader& header = cut.header;
  header.chunks = cut.available;
  if (options.chunks > 0) header.chunks = std::min(header.chunks, static_cast<uint64_t>(options.chunks));
  header.vocab = static_cast<uint32_t>(vocab);
  header.ctx = static_cast<uint32_t>(ctx);
  header.rows_per_chunk = ctx - 1 - first_scored(ctx);
  header.tokens_hash = hash_tokens(tokens.first(header.chunks * ctx));
  return cut;
}

// For the distributions to be saved.
Status check_room(const LogprobHeader& header, const PerplexityOptions& options) {
  if (options.save_base.empty() || !output_is_replaced(options.save_base)) return ok_status();
  const uint64_t needed = header.chunks * header.rows_per_chunk * logprob_record_bytes(header.vocab);
  std::filesystem::path folder = std::filesystem::path(options.save_base).parent_path();
  if (folder.empty()) folder = ".";
  std::error_code code;
  const auto space = std::filesystem::space(folder, code);
  if (code || space.available >= needed) return ok_status();
  return error(
      ErrorCode::kIo,
      "{}: the distributions take {}, but only {} are free on that disk; score fewer --chunks, or name a place on "
      "another",
      options.save_base, human_bytes(needed), human_bytes(space.available));
}

Result<LogprobReader> open_base(const std::string& path, const Chunks& cut) {
  NFP_ASSIGN_OR_RETURN(LogprobReader base, LogprobReader::open(path));
  const LogprobHeader& have = base.header();
  const LogprobHeader& wanted = cut.header;
  if (have.vocab != wanted.vocab) {
    return error(ErrorCode::kInvalidInput, "{}: was made with a vocabulary of {}, this model has {}", path, have.vocab,
                 wanted.vocab);
  }
  if (have.ctx != wanted.ctx || have.rows_per_chunk != wanted.rows_per_chunk) {
    return error(ErrorCode::kInvalidInput, "{}: was made with --ctx {}; use the same here", path, have.ctx);
  }
  if (have.chunks > cut.available) {
    return error(ErrorCode::kInvalidInput, "{}: holds {} chunks, but this text has only {}; it was made from another",
                 path, have.chunks, cut.available);
  }
  if (have.chunks != wanted.chunks) {
    return error(ErrorCode::kInvalidInput, "{}: holds {} chunks, {} are to be scored; use --chunks {}", path,
                 have.chunks, wanted.chunks, have.chunks);
  }
  if (have.tokens_hash != wanted.tokens_hash) {
    return error(ErrorCode::kInvalidInput, "{}: was made from another text, or with another tokenizer", path);
  }
  return base;
}

// What to save, and what to compare with.
struct Distributions {
  std::optional<AtomicFile> save;
  std::optional<LogprobReader> base;

  Status open(const PerplexityOptions& options, const Chunks& cut) {
    if (!options.save_base.empty()) {
      NFP_ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::create_output(options.save_base));
      save.emplace(std::move(file));
      NFP_RETURN_IF_ERROR(save->write(std::as_bytes(std::span(&cut.header, 1))));
    }
    if (!options.kld_base.empty()) {
      NFP_ASSIGN_OR_RETURN(LogprobReader reader, open_base(options.kld_base, cut));
      base.emplace(std::move(reader));
    }
    return ok_status();
  }
};

// Sums over all scored tokens.
struct Totals {
  Mean nll, kld, base_nll;
  std::vector<double> klds;
  int64_t same_top = 0;

  void add(const RowScore& score, bool has_base) {
    nll.add(score.nll);
    if (!has_base) return;
    kld.add(score.kld);
    base_nll.add(score.base_nll);
    klds.push_back(score.kld);
    same_top += score.same_top ? 1 : 0;
  }
  KldResult divergence() const {
    KldResult k;
    const auto count = static_cast<double>(klds.size());
    k.mean = kld.mean();
    k.mean_error = kld.error();
    k.median = quantile(klds, 0.5);
    k.p99 = quantile(klds, 0.99);
    k.largest = *std::max_element(klds.begin(), klds.end());
    k.same_top = static_cast<double>(same_top) / count;
    k.same_top_error = std::sqrt(k.same_top * (1 - k.same_top) / std::max(1.0, count - 1));
    k.base_perplexity = std::exp(base_nll.mean());
    return k;
  }
};

// Chunks of `ctx` tokens, of each of which the second half is scored.
class Scorer {
  static constexpr size_t kBlockRows = 256;  // scored at once: all logits of a long chunk would be gigabytes

 public:
  Scorer(const Model& model, SequenceRunner& runner, const PerplexityOptions& options, ThreadPool& threads)
      : model_(model),
        runner_(runner),
        options_(options),
        vocab_(static_cast<size_t>(model.config().vocab)),
        threads_(threads),
        logits_(std::min(rows(), kBlockRows) * vocab_),
        scores_(rows()),
        record_bytes_(logprob_record_bytes(static_cast<uint32_t>(vocab_))) {}

  size_t ctx() const { return static_cast<size_t>(options_.ctx); }
  size_t rows() const { return ctx() - 1 - first_scored(ctx()); }  // scored of a chunk

  Status score(size_t chunk, std::vector<int32_t> tokens, Distributions& files, Totals& totals) {
    if (options_.bos) tokens.front() = *options_.bos;
    NFP_RETURN_IF_ERROR(compute(chunk, tokens, files));
    for (const RowScore& score : scores_) totals.add(score, files.base.has_value());
    return ok_status();
  }

 private:
  // Scores of the chunk's rows, and what is saved of them.
  Status compute(size_t chunk, std::span<const int32_t> tokens, Distributions& files) {
    runner_.restart();
    const size_t first = first_scored(ctx());
    const auto feed = static_cast<size_t>(std::max(1, options_.max_feed));
    for (size_t done = 0; done < ctx(); done += feed) {
      const size_t count = std::min(feed, ctx() - done);
      NFP_RETURN_IF_ERROR(runner_.feed(tokens.subspan(done, count), options_.precision, {0, -1, options_.observer}));
      const size_t to = std::min(done + count, ctx() - 1);
      for (size_t from = std::max(done, first); from < to; from += kBlockRows) {
        const size_t block = std::min(kBlockRows, to - from);
        NFP_RETURN_IF_ERROR(runner_.logits(static_cast<int32_t>(from - done), static_cast<int32_t>(block),
                                           options_.precision, logits_.data()));
        NFP_RETURN_IF_ERROR(score_block(chunk, tokens, files, from - first, block));
      }
    }
    return ok_status();
  }

  // `logits_` holds rows `begin` to `begin + count` of the chunk's.
  Status score_block(size_t chunk, std::span<const int32_t> tokens, Distributions& files, size_t begin, size_t count) {
    records_.resize(files.save ? count * record_bytes_ : 0);
    threads_.run([&](int thread) {
      std::vector<float> base_row(files.base ? vocab_ : 0);
      const Range mine = partition(static_cast<int64_t>(count), thread, threads_.size());
      for (int64_t i = mine.begin; i < mine.end; ++i) {
        score_row(chunk, tokens, files, begin, static_cast<size_t>(i), base_row);
      }
    });
    const auto scored = std::span(scores_).subspan(begin, count);
    if (!std::ranges::all_of(scored, [](const RowScore& s) { return std::isfinite(s.nll); })) {
      return overflow_error(model_, "logits");
    }
    return files.save ? files.save->write(std::span(records_)) : ok_status();
  }

  // Row i of the block. base_row: room for the base's, where there is one.
  void score_row(size_t chunk, std::span<const int32_t> tokens, const Distributions& files, size_t begin, size_t i,
                 std::vector<float>& base_row) {
    const std::span<float> row(logits_.data() + i * vocab_, vocab_);
    log_softmax(row);
    const size_t at = begin + i;
    const int32_t target = tokens[first_scored(ctx()) + at + 1];
    scores_[at].nll = -static_cast<double>(row[static_cast<size_t>(target)]);
    if (!std::isfinite(scores_[at].nll)) return;  // score_block() says so
    if (files.base) {
      decode_logprobs(files.base->record(chunk * rows() + at), base_row);
      compare(base_row, row, target, scores_[at]);
    }
    if (files.save) encode_logprobs(row, records_.data() + i * record_bytes_);
  }

  const Model& model_;
  SequenceRunner& runner_;
  const PerplexityOptions& options_;
  const size_t vocab_;
  ThreadPool& threads_;
  std::vector<float> logits_;     // [at most kBlockRows, vocab]
  std::vector<RowScore> scores_;  // [rows]
  const size_t record_bytes_;
  std::vector<std::byte> records_;
};

}  // namespace

Status check_perplexity(int32_t vocab, std::span<const int32_t> tokens, const PerplexityOptions& options) {
  NFP_ASSIGN_OR_RETURN(const Chunks cut, cut_chunks(vocab, tokens, options));
  if (!options.kld_base.empty()) NFP_RETURN_IF_ERROR(open_base(options.kld_base, cut));
  return check_room(cut.header, options);
}

Result<PerplexityResult> perplexity(Model& model, std::span<const int32_t> tokens, const PerplexityOptions& options,
                                    ThreadPool& threads, const PerplexityProgress& progress) {
  NFP_ASSIGN_OR_RETURN(const Chunks cut, cut_chunks(model.config().vocab, tokens, options));
  NFP_RETURN_IF_ERROR(check_room(cut.header, options));
  NFP_ASSIGN_OR_RETURN(const auto runner,
                       SequenceRunner::create(model, options.ctx, options.max_feed, options.kv_dtype));
  Scorer scorer(model, *runner, options, threads);
  Distributions files;
  NFP_RETURN_IF_ERROR(files.open(options, cut));

  const auto started = std::chrono::steady_clock::now();
  Totals totals;
  PerplexityResult result;
  const size_t chunks = cut.header.chunks;
  for (size_t chunk = 0; chunk < chunks; ++chunk) {
    const std::span<const int32_t> part = tokens.subspan(chunk * scorer.ctx(), scorer.ctx());
    NFP_RETURN_IF_ERROR(scorer.score(chunk, {part.begin(), part.end()}, files, totals));
    result.chunks = static_cast<int64_t>(chunk) + 1;
    result.scored = totals.nll.count();
    result.perplexity = std::exp(totals.nll.mean());
    result.error = result.perplexity * totals.nll.error();
    result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
    if (progress) progress(result, static_cast<int64_t>(chunks));
  }
  if (files.save) NFP_RETURN_IF_ERROR(files.save->commit());
  if (files.base) result.kld = totals.divergence();
  return result;
}

}  // namespace nfp
