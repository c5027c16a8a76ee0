// The verbs of the program, one file each. A verb's callback leaves its outcome in `status`.
#pragma once

#include <CLI/CLI.hpp>

#include "base/result.h"

namespace nfp {

void add_generate(CLI::App& app, Status& status);
void add_chat(CLI::App& app, Status& status);
void add_convert(CLI::App& app, Status& status);
void add_restore(CLI::App& app, Status& status);
void add_inspect(CLI::App& app, Status& status);
Status inspect_plan(const std::string& path, bool json);  // of a config.json
void add_perplexity(CLI::App& app, Status& status);
void add_bench(CLI::App& app, Status& status);
void add_replay(CLI::App& app, Status& status);
void add_serve(CLI::App& app, Status& status);
void add_evaluate(CLI::App& app, Status& status);
void add_tune(CLI::App& app, Status& status);
void add_pull(CLI::App& app, Status& status);
void add_models(CLI::App& app, Status& status);
void add_doctor(CLI::App& app, Status& status);
void add_completion(CLI::App& app, Status& status);

}  // namespace nfp
