// The flags of `nestedfp serve`, and what they make of the service's options.
#pragma once

#include <CLI/CLI.hpp>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "flags.h"
#include "policy/policy.h"
#include "policy/step_table.h"
#include "runtime/loaded_model.h"
#include "server/serve/service.h"

namespace nfp {

struct ServeFlags {
  std::string model;
  server::ServiceOptions service;
  EngineConfig engine;
  LoadedModelOptions load;
  DeviceFlags device;
  ModelFlags calibration;  // only --calibrate, --fp8-share and what belongs to them
  std::vector<std::string> names;
  std::string api_key_file;
  std::string precision = "auto";
  std::string policy;  // empty = slo, with the default targets
  std::string step_times;
  std::string slo_missed = "last";
  std::vector<double> fp8_levels = {0, 0.5, 0.88, 1};
  bool exact_decode = false;
  double slo_ttft_ms = 500;
  double slo_itl_ms = 50;
  // Whether these were given by the user, whose word is not raised to what the machine can do.
  const CLI::Option* slo_ttft_given = nullptr;
  const CLI::Option* slo_itl_given = nullptr;
  const CLI::Option* request_memory_given = nullptr;
  const CLI::Option* api_key_file_given = nullptr;
  const CLI::Option* policy_given = nullptr;
  std::vector<const CLI::Option*> only_slo;  // reads them
  std::string default_request_precision = "auto";
  std::string chat_template;  // see server::choose_chat_template(); empty = the model's own
  std::string pooling = "last";
  std::string kv_dtype = "f16";
  std::string generation_config = "auto";
  bool no_prefix_caching = false;
  bool quiet = false;
  bool no_page = false;
  int32_t drain_timeout_s = 30;
  uint32_t max_body_mb = 32;
  double grammar_compile_s = 10;
  double grammar_token_ms = 10;

  void add_to(CLI::App& app) {
    add_listening(app);
    add_engine(app);
    add_precision(app);
    add_serving(app);
  }
  // Carries what was parsed over into `service` and `engine`, and checks what CLI11 cannot check: API keys from the
  // file and from NESTEDFP_API_KEY, paths, names. Once, before anything listens. Errors name the flag.
  Status resolve();
  // Of those that were given and that nothing goes by, others being as they are.
  void warn_of_idle_flags() const;
  // Whether the policy plans by predicted step times, and so is made when the model is loaded.
  bool plans() const;
  // Whether it may choose FP8 for some of the weights and not for others, which needs an order of these.
  bool plans_shares() const;
  // The policy of --precision and --precision-policy, where it does not.
  Result<std::unique_ptr<PrecisionPolicy>> make_policy() const;
  // The step times of --step-times, if it is given. Errors name the flag.
  Result<std::optional<StepTable>> given_step_times() const;
  // Warns where they were measured with another model, device, KV cache or FP8 than what is served.
  void warn_of_other_step_times(const StepTable& table, const LoadedModel& loaded) const;
  // Those of the cache folder, measured where there are none.
  Result<StepTable> load_step_times(LoadedModel& loaded) const;
  Result<std::unique_ptr<PrecisionPolicy>> make_slo_policy(const StepTable& table) const;

 private:
  void add_listening(CLI::App& app);  // what is served, where, to whom
  void add_engine(CLI::App& app);     // limits, device, KV cache
  void add_precision(CLI::App& app);  // and the policy that chooses it
  void add_serving(CLI::App& app);    // requests and answers, what they may take, logs
};

}  // namespace nfp
