// How far predictions of steps' times are off on a log that `nestedfp serve --step-log` wrote: those of the server that
// wrote it, and those that today's model makes of the same steps in their order, learning from each once it has run.
//
//     predict_steps TABLE.json STEPS.csv [IN_FLIGHT]
//
// IN_FLIGHT: steps that the engine submits before the first of them has ended, 2 on a GPU, 1 on a CPU (the default).
// Prints a line of JSON.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "base/mapped_file.h"
#include "policy/step_model.h"

namespace nfp {
namespace {

struct LoggedStep {
  Precision precision = Precision::kFp16;
  double fp8_share = 0;
  StepWork work;
  double predicted_s = 0, seconds = 0;
};

std::vector<std::string_view> split(std::string_view line, char at) {
  std::vector<std::string_view> parts;
  while (true) {
    const size_t end = line.find(at);
    parts.push_back(line.substr(0, end));
    if (end == std::string_view::npos) return parts;
    line.remove_prefix(end + 1);
  }
}

Result<std::vector<LoggedStep>> parse_log(std::string_view text, std::string_view where) {
  const std::vector<std::string_view> lines = split(text, '\n');
  std::map<std::string_view, size_t> columns;
  for (const std::string_view name : split(lines.front(), ',')) columns.emplace(name, columns.size());
  std::vector<LoggedStep> steps;
  for (size_t i = 1; i < lines.size(); ++i) {
    if (lines[i].empty()) continue;
    const std::vector<std::string_view> fields = split(lines[i], ',');
    if (fields.size() != columns.size()) {
      return error(ErrorCode::kInvalidInput, "{}: line {}: has {} fields, and the header {}", where, i + 1,
                   fields.size(), columns.size());
    }
    bool complete = true;
    const auto number = [&](std::string_view name) {
      const auto column = columns.find(name);
      double value = 0;
      if (column == columns.end()) return complete = false, value;
      const std::string_view field = fields[column->second];
      complete = std::from_chars(field.data(), field.data() + field.size(), value).ec == std::errc() && complete;
      return value;
    };
    LoggedStep& step = steps.emplace_back();
    const auto precision = columns.find("precision");
    const auto level = precision == columns.end() ? std::nullopt : precision_from_name(fields[precision->second]);
    step.fp8_share = number("fp8_share");
    step.work.tokens = static_cast<int32_t>(number("tokens"));
    step.work.sequences = static_cast<int32_t>(number("sequences"));
    step.work.singles = step.work.tokens - static_cast<int32_t>(number("prefill_tokens"));
    step.work.prefill_pairs = number("prefill_pairs");
    step.work.prefill_keys = number("prefill_keys");
    step.work.decode_keys = number("decode_keys");
    step.predicted_s = 1e-3 * number("predicted_ms");
    step.seconds = 1e-3 * number("ms");
    if (!complete || !level || !(step.seconds > 0)) {
      return error(ErrorCode::kInvalidInput, "{}: line {}: is not a line of --step-log", where, i + 1);
    }
    step.precision = *level;
    // The model knows plain steps only, as the engine's own is told of no other.
    if (columns.contains("drafted") && number("drafted") > 0) steps.pop_back();
  }
  return steps;
}

std::string summary(std::vector<double> errors) {
  if (errors.empty()) return "null";
  const auto within =
      static_cast<double>(std::count_if(errors.begin(), errors.end(), [](double e) { return e <= 0.12; })) /
      static_cast<double>(errors.size());
  const StepModel::FitError found = StepModel::FitError::of(std::move(errors));
  return fmt::format(R"({{"mean":{:.4f},"p95":{:.4f},"within_12_percent":{:.4f},"worst":{:.2f}}})", found.mean,
                     found.p95, within, found.worst);
}

Status run(const std::string& table_path, const std::string& log_path, size_t in_flight) {
  NFP_ASSIGN_OR_RETURN(const std::string table_text, read_text_file(table_path));
  NFP_ASSIGN_OR_RETURN(const std::string log_text, read_text_file(log_path));
  NFP_ASSIGN_OR_RETURN(const StepTable table, parse_step_table(table_text, table_path));
  NFP_ASSIGN_OR_RETURN(const std::vector<LoggedStep> steps, parse_log(log_text, log_path));
  NFP_ASSIGN_OR_RETURN(StepModel fitted, StepModel::fit(table));
  std::vector<double> shares;
  for (const LoggedStep& step : steps) {
    if (step.fp8_share > 0 && std::find(shares.begin(), shares.end(), step.fp8_share) == shares.end()) {
      shares.push_back(step.fp8_share);
    }
  }
  std::sort(shares.begin(), shares.end());
  StepModel model = fitted.at_shares(shares);
  std::vector<double> logged, predicted;
  const auto observe = [&](const LoggedStep& step) {
    model.observe(model.find_level(step.precision, step.fp8_share), step.work, step.seconds);
  };
  for (size_t i = 0; i < steps.size(); ++i) {
    if (i >= in_flight) observe(steps[i - in_flight]);
    const LoggedStep& step = steps[i];
    const size_t level = model.find_level(step.precision, step.fp8_share);
    if (level >= model.levels().size()) continue;
    predicted.push_back(std::abs(model.seconds(level, step.work) - step.seconds) / step.seconds);
    if (step.predicted_s > 0) logged.push_back(std::abs(step.predicted_s - step.seconds) / step.seconds);
  }
  fmt::print(R"({{"steps":{},"as_logged":{},"predicted":{}}})"
             "\n",
             steps.size(), summary(logged), summary(predicted));
  return ok_status();
}

}  // namespace
}  // namespace nfp

int main(int argc, char** argv) {
  if (argc < 3) {
    fmt::print(stderr, "predict_steps TABLE.json STEPS.csv [IN_FLIGHT]\n");
    return 2;
  }
  const nfp::Status status = nfp::run(argv[1], argv[2], argc > 3 ? static_cast<size_t>(std::max(1, atoi(argv[3]))) : 1);
  if (!status.ok()) fmt::print(stderr, "{}\n", status.error().message);
  return status.ok() ? 0 : 1;
}
