#include "tiny_model.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <numeric>
#include <random>
#include <string_view>

#include "backend/cpu/cpu_backend.h"
#include "backend/devices/devices.h"
#include "base/mapped_file.h"
#include "model/dummy_model.h"

namespace nfp::testing {
namespace {

constexpr int32_t kBlockSize = 16;
constexpr int32_t kMaxTokens = 256;
constexpr int32_t kMaxPositions = 256;

// Little-endian FP32 values in base64, as the goldens keep them.
std::vector<float> decode_floats(std::string_view text) {
  std::vector<uint8_t> bytes;
  uint32_t bits = 0;
  int count = 0;
  for (const char c : text) {
    constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const size_t digit = kDigits.find(c);
    if (digit == std::string_view::npos) break;  // padding
    bits = bits << 6 | static_cast<uint32_t>(digit);
    count += 6;
    if (count >= 8) {
      count -= 8;
      bytes.push_back(static_cast<uint8_t>(bits >> count));
    }
  }
  std::vector<float> values(bytes.size() / sizeof(float));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), values.size() * sizeof(float));
  return values;
}

GoldenPrecision read_precision(const nlohmann::json& json) {
  GoldenPrecision result;
  result.fp32_error = json.at("fp32_error");
  for (const auto& item : json.at("sequences")) {
    GoldenSequence sequence;
    sequence.tokens = item.at("tokens").get<std::vector<int32_t>>();
    sequence.last_logits = decode_floats(item.at("last_logits").get<std::string>());
    sequence.bf16_error = item.value("bf16_error", 0.0);
    if (item.contains("argmax")) {
      sequence.argmax = item.at("argmax").get<std::vector<int32_t>>();
      sequence.max_logit = decode_floats(item.at("max_logit").get<std::string>());
      sequence.log_sum_exp = decode_floats(item.at("log_sum_exp").get<std::string>());
    }
    result.sequences.push_back(std::move(sequence));
  }
  result.greedy_prompt = json.at("greedy").at("tokens").get<std::vector<int32_t>>();
  result.greedy_continuation = json.at("greedy").at("continuation").get<std::vector<int32_t>>();
  return result;
}

template <typename T>
Result<Buffer> to_device(Backend& backend, const std::vector<T>& values) {
  NFP_ASSIGN_OR_RETURN(Buffer buffer, backend.allocate(values.size() * sizeof(T)));
  NFP_RETURN_IF_ERROR(backend.upload(buffer.data(), values.data(), values.size() * sizeof(T)));
  return buffer;
}

// As it was when this program was built; the environment says where a program was carried to another machine.
std::string folder_of(const char* variable, const char* built) {
  const char* named = std::getenv(variable);
  return named != nullptr ? named : built;
}

}  // namespace

Result<Golden> read_golden(const std::string& name) {
  const std::string path = folder_of("NFP_SOURCE_DIR", NFP_SOURCE_DIR) + "/tests/golden/" + name + ".json";
  NFP_ASSIGN_OR_RETURN(const std::string text, read_text_file(path));
  try {
    const auto json = nlohmann::json::parse(text);
    Golden golden;
    golden.fp16 = read_precision(json.at("fp16"));
    golden.fp8 = read_precision(json.at("fp8"));
    golden.matrices = json.at("nesting").at("matrices");
    golden.nested_by_paper = json.at("nesting").at("by_paper");
    golden.rows_with_exponent = json.at("nesting").at("rows_with_exponent");
    golden.dense = json.at("nesting").at("dense").get<std::vector<std::string>>();
    return golden;
  } catch (const nlohmann::json::exception& e) {
    return error(ErrorCode::kInvalidInput, "{}: {}", path, e.what());
  }
}

std::string tiny_model_folder(const std::string& name) {
  if (name.find('/') != std::string::npos) return name;
  std::string folder = folder_of("NFP_BINARY_DIR", NFP_BINARY_DIR) + "/tests/tiny_models/" + name;
  return std::filesystem::exists(folder + "/config.json") ? folder : std::string();
}

Schedule one_by_one(const std::vector<std::vector<int32_t>>& sequences) {
  Schedule schedule;
  for (size_t i = 0; i < sequences.size(); ++i) schedule.push_back({{i, sequences[i].size()}});
  return schedule;
}

Schedule random_schedule(uint32_t seed, const std::vector<std::vector<int32_t>>& sequences) {
  std::mt19937 random(seed);
  std::vector<size_t> done(sequences.size(), 0);
  Schedule schedule;
  while (true) {
    std::vector<Piece> singles, pieces;
    for (size_t i = 0; i < sequences.size(); ++i) {
      const size_t left = sequences[i].size() - done[i];
      if (left == 0 || random() % 3 == 0) continue;
      const size_t count = random() % 2 == 0 ? 1 : std::min<size_t>(left, 1 + random() % 40);
      (count == 1 ? singles : pieces).push_back({i, count});
      done[i] += count;
    }
    singles.insert(singles.end(), pieces.begin(), pieces.end());
    if (!singles.empty()) schedule.push_back(singles);
    bool all = true;
    for (size_t i = 0; i < sequences.size(); ++i) all = all && done[i] == sequences[i].size();
    if (all) return schedule;
  }
}

Result<std::unique_ptr<TinyModel>> TinyModel::load(const std::string& name, const std::string& kernels, int threads,
                                                   MatrixFilter filter) {
  std::unique_ptr<TinyModel> tiny(new TinyModel(threads));
  const std::string folder = tiny_model_folder(name);
  const bool dummy = name.ends_with("/config.json");
  NFP_ASSIGN_OR_RETURN(tiny->source_, dummy ? open_dummy_model(folder) : ModelSource::open(folder));
  NFP_ASSIGN_OR_RETURN(const ModelConfig config, parse_config(tiny->source_->config_json(), name + "/config.json"));
  if (kernels.starts_with("cuda")) {
    NFP_ASSIGN_OR_RETURN(tiny->backend_,
                         make_backend("cuda", {.threads = threads, .deterministic = kernels == "cuda"}));
  } else {
    NFP_ASSIGN_OR_RETURN(tiny->backend_, make_cpu_backend({.threads = threads, .pin = false, .kernels = kernels}));
  }
  LoadOptions options;
  options.filter = std::move(filter);
  NFP_ASSIGN_OR_RETURN(tiny->model_, load_model(*tiny->source_, config, *tiny->backend_, tiny->threads_, options));
  NFP_RETURN_IF_ERROR(tiny->model_->reserve(kMaxTokens, kMaxTokens, kMaxPositions));
  StepLimits limits;
  limits.tokens = limits.sequences = kMaxTokens;
  limits.table_width = kMaxPositions / kBlockSize + 1;
  limits.vocab = config.vocab;
  limits.block_size = kBlockSize;
  NFP_ASSIGN_OR_RETURN(tiny->input_, StepInput::create(*tiny->backend_, limits));
  return tiny;
}

Result<std::vector<std::vector<float>>> TinyModel::run(const std::vector<std::vector<int32_t>>& sequences,
                                                       const Schedule& schedule, Precision precision, DType kv_dtype,
                                                       bool last_only) {
  // Neighbouring blocks of a sequence lie apart and in descending order, as they may after some time of use.
  std::vector<std::vector<int32_t>> tables(sequences.size());
  int32_t blocks = 0;
  for (const auto& sequence : sequences) blocks += static_cast<int32_t>(sequence.size()) / kBlockSize + 1;
  int32_t next = blocks;
  for (int32_t round = 0; next > 0; ++round) {
    for (size_t i = 0; i < sequences.size(); ++i) {
      if (round <= static_cast<int32_t>(sequences[i].size()) / kBlockSize) tables[i].push_back(--next);
    }
  }
  NFP_ASSIGN_OR_RETURN(const auto cache, backend_->make_kv_cache(model_->kv_spec(blocks, kBlockSize, kv_dtype)));
  std::vector<std::vector<float>> logits(sequences.size());
  for (const auto& pieces : schedule) {
    NFP_RETURN_IF_ERROR(step(sequences, pieces, tables, precision, *cache, last_only, logits));
  }
  return logits;
}

Status TinyModel::step(const std::vector<std::vector<int32_t>>& sequences, const std::vector<Piece>& pieces,
                       const std::vector<std::vector<int32_t>>& tables, Precision precision, KvCache& cache,
                       bool last_only, std::vector<std::vector<float>>& logits) {
  const auto vocab = static_cast<size_t>(config().vocab);
  StepShape shape;
  for (const Piece& piece : pieces) {
    if (piece.count == 1 && shape.single == shape.sequences) ++shape.single;
    ++shape.sequences;
    shape.tokens += static_cast<int32_t>(piece.count);
  }
  shape.last_only = last_only;
  input_->begin(0, shape);
  for (const Piece& piece : pieces) {
    const size_t first = logits[piece.sequence].size() / vocab;
    input_->add({.tokens = std::span(sequences[piece.sequence]).subspan(first, piece.count),
                 .first = static_cast<int32_t>(first),
                 .source = -1,
                 .blocks = tables[piece.sequence]});
  }
  input_->upload();
  std::vector<int32_t> rows(static_cast<size_t>(last_only ? shape.sequences : shape.tokens));
  std::iota(rows.begin(), rows.end(), 0);
  NFP_ASSIGN_OR_RETURN(const Buffer d_rows, to_device(*backend_, rows));

  model_->forward({input_->view(shape, nullptr), precision, &cache});
  const size_t bytes = rows.size() * vocab * sizeof(float);
  NFP_ASSIGN_OR_RETURN(const Buffer d_logits, backend_->allocate(bytes));
  model_->logits(d_rows.as<int32_t>(), static_cast<int32_t>(rows.size()), precision, d_logits.as<float>());
  std::vector<float> values(rows.size() * vocab);
  NFP_RETURN_IF_ERROR(backend_->download(values.data(), d_logits.data(), bytes));
  auto from = values.begin();
  for (const Piece& piece : pieces) {
    auto& out = logits[piece.sequence];
    const size_t computed = last_only ? 1 : piece.count;
    out.resize(out.size() + (piece.count - computed) * vocab, std::numeric_limits<float>::quiet_NaN());
    const auto to = from + static_cast<ptrdiff_t>(computed * vocab);
    out.insert(out.end(), from, to);
    from = to;
  }
  return ok_status();
}

}  // namespace nfp::testing
