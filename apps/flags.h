// The one place where flags that several verbs share become options.
#pragma once

#include <CLI/CLI.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "calibrate/calibrate.h"
#include "engine/request.h"
#include "policy/policy.h"
#include "runtime/loaded_model.h"
#include "runtime/sampling_defaults.h"

namespace nfp {

// Where and how the engine computes: --device and what belongs to it.
struct DeviceFlags {
  std::string device = "auto";
  std::string load_format = "auto";
  bool deterministic = false;
  std::string gemm_choices;
  double gpu_memory_utilization = EngineConfig{}.memory_share;

  void add_to(CLI::App& app);
  void apply(LoadedModelOptions& options) const;
};

// --dtype-kv
void add_kv_dtype_flag(CLI::App& app, std::string& name);
// --speculative-tokens, and a warning where it has no effect beside --precision
void add_speculative_flag(CLI::App& app, int32_t& tokens);
void warn_of_idle_speculation(int32_t tokens, const std::string& precision);
// Warns of flags of `verb` that say how FP8 steps compute, where `only`, such as "--precision fp16", has none.
void warn_of_idle_fp8_flags(const CLI::App& verb, std::string_view only);
DType kv_dtype_from_name(const std::string& name);

struct ModelFlags {
  DeviceFlags device;
  std::string model;
  std::string precision = "fp16";
  std::string kv_dtype = "f16";
  std::string baseline = "none";
  int32_t threads = 0;
  int32_t ctx = 0;
  int32_t speculative_tokens = 0;
  bool speculative_always = false;
  bool fp8_head = false;
  std::string calibrate = "none";
  std::string calibrate_rule = "free";
  std::string calibrate_compensate = "auto";
  bool calibrate_smooth = false;
  int64_t calibrate_tokens = 0;
  uint64_t calibrate_seed = 0;
  double fp8_share = 1.0;
  bool needs_tokenizer = true;  // not a flag: LoadedModelOptions has it
  void add_to(CLI::App& app);
  void add_speculation(CLI::App& app);  // --speculative-tokens, --speculative-always
  // Loads with a progress bar on stderr. What runs needs `context` tokens by these flags, or what --ctx says.
  Result<std::unique_ptr<LoadedModel>> load(bool needs_sensitivity = false, int32_t context = 0,
                                            const std::string& context_flags = "--ctx",
                                            std::function<Status(const LoadedModel&)> before_weights = {}) const;
  // The name that errors about a context have for --ctx where `unless_given` stands in for it.
  std::string ctx_flag(int32_t unless_given) const;
  CalibrationOptions calibration_options() const;
  // The first flag that was given beside --calibrate and says how; empty = none.
  std::string calibration_flag() const;
  // Warns where `text`, which figures are measured on, is what is calibrated on, too.
  void warn_of_calibration_text(std::string_view text) const;
  // Error: flags that say how to calibrate, where it is not done.
  Status check_calibration() const;
  Precision precision_value() const { return *precision_from_name(precision); }
  DType kv_dtype_value() const { return kv_dtype_from_name(kv_dtype); }
  // For one sequence at a time.
  EngineConfig engine_config() const;
};

// Loads flags.model as `options` say, with the uppers that --calibrate asks for and, where `needs_sensitivity` or
// --fp8-share does, with the order of sensitivity set.
Result<std::unique_ptr<LoadedModel>> load_calibrated(const ModelFlags& flags, LoadedModelOptions options,
                                                     bool needs_sensitivity);

// --fp8-share; --calibrate and what belongs to it.
void add_share_flag(CLI::App& app, ModelFlags& flags);
void add_calibration_flags(CLI::App& app, ModelFlags& flags);

// --generation-config
void add_generation_config_flag(CLI::App& app, std::string& where);

struct SamplingFlags {
  SamplingParams params;
  int32_t max_tokens = 0;  // 0 = until the context is full
  std::string seed;        // not given = random
  std::string generation_config = "auto";

  // `fallback`: for models that say nothing of how they are to be sampled.
  void add_to(CLI::App& app, const SamplingParams& fallback);
  // What can be wrong before the model is there. Errors name the flag.
  Status check() const;
  // What was given; else what the model says; else, where it says nothing at all, the fallback.
  Result<SamplingParams> value(const SamplingDefaults& model) const;
  // Over the defaults that --generation-config names.
  Result<SamplingParams> of_model(const ModelSource& source) const;

 private:
  CLI::Option* temperature_ = nullptr;
  CLI::Option* top_k_ = nullptr;
  CLI::Option* top_p_ = nullptr;
  CLI::Option* min_p_ = nullptr;
  CLI::Option* repetition_penalty_ = nullptr;
  CLI::Option* max_tokens_ = nullptr;
  CLI::Option* seed_ = nullptr;
};

// An error of the engine's about a request, whose fields it names ("top_p is 7; ..."), with the flags that set them.
Error naming_flags(Error of_request);

// The text of the file that `flag` names. Errors name the flag.
Result<std::string> read_flag_file(std::string_view flag, const std::string& path);

// The same of a text that a model reads. Error: it is not UTF-8, so that what is read would be replacement characters.
Result<std::string> read_plain_text(std::string_view flag, const std::string& path);

}  // namespace nfp
