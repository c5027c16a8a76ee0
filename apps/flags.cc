#include "flags.h"

#include <algorithm>
#include <charconv>

#include "backend/devices/devices.h"
#include "base/log.h"
#include "base/mapped_file.h"
#include "base/stop_signals.h"
#include "eval/baselines.h"
#include "progress_bar.h"
#include "text/utf8.h"

namespace nfp {

void DeviceFlags::add_to(CLI::App& app) {
  app.add_option("--device", device, "cuda: a Hopper GPU (H100, H200); cpu; auto: a GPU where there is a usable one")
      ->check(CLI::IsMember(device_names()))
      ->capture_default_str();
  app.add_flag("--deterministic", deterministic,
               "on a GPU: a request's numbers do not depend on what else is computed beside it (slower)");
  app.add_option("--gemm-choices", gemm_choices,
                 "on a GPU: kernels that `nestedfp tune MODEL` found the fastest, before the built-in choices")
      ->check(CLI::ExistingFile);
  app.add_option("--gpu-memory-utilization", gpu_memory_utilization,
                 "share of the GPU's memory that weights, buffers and KV cache may take together")
      ->check(CLI::Range(0.05, 1.0))
      ->capture_default_str();
  app.add_option("--load-format", load_format,
                 "auto: the model's files; dummy: MODEL holds only a config.json and gets random weights, to measure "
                 "the speed of models that are not at hand")
      ->check(CLI::IsMember({"auto", "dummy"}))
      ->capture_default_str();
}

void DeviceFlags::apply(LoadedModelOptions& options) const {
  options.device = device;
  options.deterministic = deterministic;
  options.gemm_choices = gemm_choices;
  options.dummy = load_format == "dummy";
}

void add_kv_dtype_flag(CLI::App& app, std::string& name) {
  app.add_option("--dtype-kv", name,
                 "number format of the KV cache; fp8: E4M3, half the memory, rounds keys and values in every precision "
                 "(beyond 448 to 448); f32: CPU only")
      ->check(CLI::IsMember({"f16", "fp8", "f32"}))
      ->capture_default_str();
}

void add_speculative_flag(CLI::App& app, int32_t& tokens) {
  app.add_option(
         "--speculative-tokens", tokens,
         "speculative decoding of FP16 steps: at most so many tokens ahead are drafted in FP8, by the same "
         "weights, and verified in FP16 at once; answers stay FP16's, and drafting stops where it gains nothing")
      ->check(CLI::Range(0, kMaxDrafts))
      ->capture_default_str();
}

void warn_of_idle_speculation(int32_t tokens, const std::string& precision) {
  if (tokens == 0 || !precision.starts_with("fp8")) return;
  log::warn("--speculative-tokens: does nothing, as drafts are for FP16 steps, and --precision {} has none", precision);
}

void warn_of_idle_fp8_flags(const CLI::App& verb, std::string_view only) {
  for (const char* name : {"--fp8-share", "--fp8-head", "--calibrate"}) {
    if (verb.count(name) > 0) log::warn("{}: does nothing, as it is of FP8 steps, and {} has none", name, only);
  }
}

DType kv_dtype_from_name(const std::string& name) {
  if (name == "fp8") return DType::kF8E4M3;
  return name == "f32" ? DType::kF32 : DType::kF16;
}

void ModelFlags::add_to(CLI::App& app) {
  app.add_option("MODEL", model,
                 "Hugging Face directory, nested checkpoint, .gguf file, or org/name in the local Hugging Face cache")
      ->required();
  app.add_option(
         "--precision", precision,
         "fp16: exact, reads both bytes of every weight; fp8: reads upper bytes only; fp8-w8a8: upper bytes and E4M3 "
         "activations, as Hopper computes")
      ->check(CLI::IsMember({"fp16", "fp8", "fp8-w8a8"}))
      ->capture_default_str();
  app.add_option("--threads", threads, "threads to compute with; 0 = as many as this process may use")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  app.add_option("--ctx", ctx, "tokens of context; 0 = the model's own, at most what the KV cache holds")
      ->check(CLI::Range(0, 1 << 30))
      ->capture_default_str();
  add_kv_dtype_flag(app, kv_dtype);
  app.add_flag("--fp8-head", fp8_head, "let the last matrix (lm_head) compute in FP8 too in FP8 steps");
  device.add_to(app);
  add_share_flag(app, *this);
  add_calibration_flags(app, *this);
  app.add_option(
         "--baseline", baseline,
         "for evaluation: hold the weights another way (fp8-channel: FP8 with one scale a row; f16: plain FP16)")
      ->check(CLI::IsMember({"none", "fp8-channel", "f16"}))
      ->capture_default_str();
}

void ModelFlags::add_speculation(CLI::App& app) {
  add_speculative_flag(app, speculative_tokens);
  app.add_flag("--speculative-always", speculative_always,
               "draft all --speculative-tokens in every step that may, whether it gains or not");
}

void add_share_flag(CLI::App& app, ModelFlags& flags) {
  app.add_option("--fp8-share", flags.fp8_share,
                 "share of the weights that FP8 steps run in FP8 at most, those that it harms least; 0..1")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
}

void add_calibration_flags(CLI::App& app, ModelFlags& flags) {
  app.add_option("--calibrate", flags.calibrate,
                 "choose the FP8 neighbour of every weight so that FP8 is closest to FP16, which stays exact: self (on "
                 "text that the model writes), a text file, or none; kept in the user's cache")
      ->capture_default_str();
  app.add_option("--calibrate-rule", flags.calibrate_rule,
                 "free: any weight may take either neighbour; restricted: only those that keep the fast join")
      ->check(CLI::IsMember({"free", "restricted"}))
      ->capture_default_str();
  app.add_option(
         "--calibrate-compensate", flags.calibrate_compensate,
         "let every layer make up for the errors of those before it: closer to FP16 where all layers compute in "
         "FP8, and some 5 times slower to make; auto: with a text file")
      ->check(CLI::IsMember({"auto", "on", "off"}))
      ->capture_default_str();
  app.add_flag(
      "--calibrate-smooth", flags.calibrate_smooth,
      "first bring the channels of activations closer to each other in size, by powers of two that keep FP16 "
      "as it is: for engines that clip activations to one scale a tensor; fp8 and fp8-w8a8 gain nothing by it");
  app.add_option(
         "--calibrate-tokens", flags.calibrate_tokens,
         "tokens to calibrate on, of the model's own 524288 at most; 0 = 12288 of these, at most 65536 of a file")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 30))
      ->capture_default_str();
  app.add_option("--calibrate-seed", flags.calibrate_seed, "seed of the model's own text")->capture_default_str();
}

CalibrationOptions ModelFlags::calibration_options() const {
  CalibrationOptions options;
  options.text = calibrate;
  options.rule = calibrate_rule == "free" ? UpperRule::kFree : UpperRule::kRestricted;
  options.smooth = calibrate_smooth;
  options.tokens = calibrate_tokens;
  options.seed = calibrate_seed;
  if (calibrate_compensate != "auto") options.compensate = calibrate_compensate == "on";
  options.threads = threads;
  return options;
}

EngineConfig ModelFlags::engine_config() const {
  EngineConfig config;
  config.limits.max_sequences = 1;
  config.limits.max_step_tokens = 0;
  config.max_context = ctx;
  config.memory_share = device.gpu_memory_utilization;
  config.kv_dtype = kv_dtype_value();
  config.speculative_tokens = speculative_tokens;
  config.speculative_always = speculative_always;
  return config;
}

std::string ModelFlags::calibration_flag() const {
  const ModelFlags unset;
  if (calibrate_rule != unset.calibrate_rule) return "--calibrate-rule";
  if (calibrate_compensate != unset.calibrate_compensate) return "--calibrate-compensate";
  if (calibrate_smooth) return "--calibrate-smooth";
  if (calibrate_tokens != unset.calibrate_tokens) return "--calibrate-tokens";
  if (calibrate_seed != unset.calibrate_seed) return "--calibrate-seed";
  return "";
}

Status ModelFlags::check_calibration() const {
  if (calibrate == kSelfText && calibrate_tokens > kMostSelfTokens) {
    return error(ErrorCode::kUsage, "--calibrate-tokens: {} of the model's own at most; for more name a text file",
                 kMostSelfTokens);
  }
  const std::string flag = calibration_flag();
  if (calibrate != "none" || flag.empty()) return ok_status();
  return error(ErrorCode::kUsage,
               "{} says how to calibrate, and nothing is calibrated; add --calibrate self or a text file", flag);
}

void ModelFlags::warn_of_calibration_text(std::string_view text) const {
  if (calibrate == "none" || calibrate == kSelfText) return;
  const auto calibrated = read_text_file(calibrate);
  if (!calibrated.ok() || *calibrated != text) return;
  log::warn(
      "--calibrate and --file are the same text: FP8 is closer to FP16 on it than on any other; calibrate on other "
      "text, or with self");
}

Result<std::unique_ptr<LoadedModel>> ModelFlags::load(bool needs_sensitivity, int32_t context,
                                                      const std::string& context_flags,
                                                      std::function<Status(const LoadedModel&)> before_weights) const {
  if (baseline == "fp8-channel" && is_exact(precision_value())) {
    return error(ErrorCode::kUsage, "--baseline fp8-channel has no FP16 form; add --precision fp8 or fp8-w8a8");
  }
  if (speculative_always && speculative_tokens == 0) {
    log::warn("--speculative-always: does nothing, as nothing is drafted without --speculative-tokens");
  }
  LoadedModelOptions options;
  device.apply(options);
  options.needs_tokenizer = needs_tokenizer;
  options.threads = threads;
  options.context = std::max(ctx, context);
  options.context_flag = ctx > context ? "--ctx" : context_flags;
  options.fp8_head = fp8_head;
  options.before_weights = std::move(before_weights);
  if (baseline == "fp8-channel") options.filter = fp8_channel_filter(fp8_head);
  if (baseline == "f16") options.filter = dense_filter();
  const StopRemovesTemporaries stop;
  ProgressBar bar;
  options.progress = bar.callback();
  return load_calibrated(*this, std::move(options), needs_sensitivity);
}

std::string ModelFlags::ctx_flag(int32_t unless_given) const {
  return ctx > 0 ? "--ctx" : fmt::format("--ctx ({} unless given)", unless_given);
}

Result<std::unique_ptr<LoadedModel>> load_calibrated(const ModelFlags& flags, LoadedModelOptions options,
                                                     bool needs_sensitivity) {
  needs_sensitivity = needs_sensitivity || flags.fp8_share < 1.0;
  std::vector<Sensitivity> order;
  NFP_RETURN_IF_ERROR(flags.check_calibration());
  if (flags.calibrate != "none") {
    NFP_RETURN_IF_ERROR(outline(flags.model, options));
    CalibrationOptions calibration = flags.calibration_options();
    calibration.threads = options.threads;
    calibration.progress = options.progress;
    calibration.measure_sensitivity = needs_sensitivity;
    NFP_ASSIGN_OR_RETURN(Calibration made, calibrate(flags.model, calibration));
    options.filter = chain(made.filter(), std::move(options.filter));
    options.scalings = made.scalings;
    order = std::move(made.sensitivities);
  }
  NFP_ASSIGN_OR_RETURN(auto loaded, nfp::load(flags.model, options));
  if (needs_sensitivity) {
    if (order.empty()) {
      auto stored = stored_sensitivity(*loaded->source);
      if (!stored.ok() && stored.error().code != ErrorCode::kUsage) return stored.error();
      order = stored.ok() ? std::move(stored).value() : default_fp8_order(*loaded->model);
    }
    NFP_ASSIGN_OR_RETURN([[maybe_unused]] const double reached, set_fp8_share(*loaded->model, order, flags.fp8_share));
  }
  return loaded;
}

void add_generation_config_flag(CLI::App& app, std::string& where) {
  app.add_option("--generation-config", where,
                 "defaults of temperature, top-k, top-p, min-p, repetition penalty and length: auto (the model's own), "
                 "none, or a directory with a generation_config.json")
      ->capture_default_str();
}

void SamplingFlags::add_to(CLI::App& app, const SamplingParams& fallback) {
  params = fallback;
  max_tokens_ = app.add_option("-n,--max-tokens", max_tokens,
                               "tokens to generate at most; 0 = until the context is full, also where the model's "
                               "generation_config.json has fewer")
                    ->check(CLI::Range(0, 1 << 30))
                    ->capture_default_str();
  app.add_option("--min-tokens", params.min_tokens, "tokens to generate at least")->capture_default_str();
  add_generation_config_flag(app, generation_config);
  temperature_ = app.add_option("--temperature", params.temperature, "0 = greedy: always the likeliest token");
  top_k_ = app.add_option("--top-k", params.top_k, "sample from the K likeliest tokens; 0 = off");
  top_p_ = app.add_option("--top-p", params.top_p,
                          "sample from the likeliest tokens that hold this probability; 1 = off, 0 = the likeliest");
  min_p_ =
      app.add_option("--min-p", params.min_p, "leave out tokens less likely than this share of the likeliest; 0 = off");
  repetition_penalty_ =
      app.add_option("--repetition-penalty", params.repetition_penalty, "divide logits of tokens seen before; 1 = off");
  for (CLI::Option* option : {temperature_, top_k_, top_p_, min_p_, repetition_penalty_}) {
    option->capture_default_str();
  }
  app.add_option("--presence-penalty", params.presence_penalty,
                 "subtract from logits of tokens generated before; 0 = off")
      ->capture_default_str();
  app.add_option("--frequency-penalty", params.frequency_penalty, "the same, for each time they were; 0 = off")
      ->capture_default_str();
  seed_ = app.add_option("--seed", seed, "makes sampling repeatable; without it each run differs");
  app.add_option("--stop", params.stop, "end before this text appears (may be given several times)")
      ->allow_extra_args(false);
  app.add_option("--stop-token-ids", params.stop_token_ids, "end at these token ids");
  app.add_flag("--ignore-eos", params.ignore_eos, "go on after the model's end-of-generation token");
}

Status SamplingFlags::check() const {
  if (!std::all_of(params.stop.begin(), params.stop.end(), [](const std::string& s) { return text::is_utf8(s); })) {
    return error(ErrorCode::kUsage, "--stop is not UTF-8: no answer could hold it");
  }
  NFP_ASSIGN_OR_RETURN(const SamplingParams made, value({}));
  constexpr int32_t kAnyToken = 0, kMost = INT32_MAX;  // the model's vocabulary and context bound more
  if (const auto bad = validate({&kAnyToken, 1}, made, {kMost, kMost})) {
    return naming_flags({ErrorCode::kUsage, bad->message});
  }
  return ok_status();
}

Result<std::string> read_flag_file(std::string_view flag, const std::string& path) {
  auto text = read_text_file(path);
  if (!text.ok()) return error(text.error().code, "{}: {}; name a text file", flag, text.error().message);
  return text;
}

Result<std::string> read_plain_text(std::string_view flag, const std::string& path) {
  NFP_ASSIGN_OR_RETURN(std::string text, read_flag_file(flag, path));
  if (!text::is_utf8(text)) {
    return error(ErrorCode::kInvalidInput, "{}: {}: is not UTF-8; name a file of plain text", flag, path);
  }
  return text;
}

Error naming_flags(Error of_request) {
  // "stop" is a word too: it is the field where the message begins with it.
  constexpr std::string_view kFields[] = {"temperature",
                                          "top_k",
                                          "top_p",
                                          "min_p",
                                          "repetition_penalty",
                                          "presence_penalty",
                                          "max_tokens",
                                          "min_tokens",
                                          "frequency_penalty",
                                          "stop_token_ids"};
  const auto flag = [](std::string_view field) {
    std::string name = "--" + std::string(field);
    std::replace(name.begin(), name.end(), '_', '-');
    return name;
  };
  std::string& text = of_request.message;
  if (text.starts_with("stop:")) text.insert(0, "--");
  for (const std::string_view field : kFields) {
    const std::string name = flag(field);
    for (size_t at = 0; (at = text.find(field, at)) != std::string::npos; at += name.size()) {
      text.replace(at, field.size(), name);
    }
  }
  return of_request;
}

Result<SamplingParams> SamplingFlags::value(const SamplingDefaults& model) const {
  SamplingParams result = params;
  SamplingParams theirs;
  model.apply(theirs);
  if (model.says_how_to_draw()) {
    if (temperature_->count() == 0) result.temperature = theirs.temperature;
    if (top_k_->count() == 0) result.top_k = theirs.top_k;
    if (top_p_->count() == 0) result.top_p = theirs.top_p;
    if (min_p_->count() == 0) result.min_p = theirs.min_p;
    if (repetition_penalty_->count() == 0) result.repetition_penalty = theirs.repetition_penalty;
  }
  if (max_tokens_->count() == 0) result.default_max_tokens = theirs.default_max_tokens;
  if (max_tokens > 0) result.max_tokens = max_tokens;
  if (seed_->count() > 0) {
    uint64_t number = 0;
    const auto [end, code] = std::from_chars(seed.data(), seed.data() + seed.size(), number);
    if (code != std::errc() || end != seed.data() + seed.size()) {
      return error(ErrorCode::kUsage, "--seed {}: must be a whole number from 0 to 2^64 - 1", seed);
    }
    result.seed = number;
  }
  return result;
}

Result<SamplingParams> SamplingFlags::of_model(const ModelSource& source) const {
  NFP_ASSIGN_OR_RETURN(const SamplingDefaults defaults, load_sampling_defaults(source, generation_config));
  return value(defaults);
}

}  // namespace nfp
