#include "bench_report.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/byte_size.h"
#include "flags.h"
#include "json_output.h"

namespace nfp {
namespace {

// The rate that bounds a row's arithmetic: FP8 steps run on BF16 dot products, FP16 multiply-adds or tiles where the
// kernels in use have them, FP16 steps on tiles, three products each (PairArithmetic::kBf16Tiles).
double arithmetic_ceiling(const cpu::MachineCeilings& ceilings, const LoadedModel& loaded, Precision precision) {
  const std::string_view kernels = loaded.backend->info().kernels;
  if (kernels == "amx") return is_exact(precision) ? ceilings.tile_gflops / 3 : ceilings.tile_gflops;
  if (is_exact(precision)) return ceilings.fma_gflops;
  if (kernels == "avx512bf16") return ceilings.bf16_gflops;
  return kernels == "avx512fp16" ? ceilings.fp16_gflops : ceilings.fma_gflops;
}

// "42.9 (71%)", the share only where the ceiling is known.
std::string with_share(double value, double ceiling) {
  return ceiling > 0 ? fmt::format("{:.1f} ({:.0f}%)", value, 100 * value / ceiling) : fmt::format("{:.1f}", value);
}

}  // namespace

void print_json(const BenchmarkOptions& options, const LoadedModel& loaded, const std::vector<BenchmarkRow>& rows,
                size_t peak_memory, const Ceilings& ceilings) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const BenchmarkRow& row : rows) {
    nlohmann::ordered_json stages = nlohmann::ordered_json::object();
    nlohmann::ordered_json bytes = nlohmann::ordered_json::object();
    // A stage's products may be of two precisions.
    const auto add = [](nlohmann::ordered_json& to, std::string_view name, auto value) {
      nlohmann::ordered_json& sum = to[std::string(name)];
      sum = sum.is_null() ? value : sum.get<decltype(value)>() + value;
    };
    for (const StageTime& time : row.stages) {
      add(stages, time.stage, time.seconds * 1e6);
      if (time.cost.weight_bytes > 0) add(bytes, time.stage, time.cost.weight_bytes);
    }
    list.push_back({{"test", row.test},
                    {"precision", name_of(row.precision)},
                    {"batch", row.batch},
                    {"tokens_per_s", row.tokens_per_s},
                    {"step_ms", row.step_ms},
                    {"weight_gb_per_s", row.weight_gb_per_s},
                    {"gflop_per_s", row.gflop_per_s},
                    {"stage_us", stages},
                    {"stage_weight_bytes", bytes}});
    if (ceilings) {
      list.back()["share_of_read"] = row.weight_gb_per_s / ceilings->read_gbs;
      list.back()["read_gb_per_s"] = row.read_gb_per_s;
      list.back()["over_reading"] = row.over_reading;
      list.back()["share_of_arithmetic"] = row.gflop_per_s / arithmetic_ceiling(*ceilings, loaded, row.precision);
    }
  }
  nlohmann::ordered_json out = {{"model", loaded.name},
                                {"device", loaded.backend->info().device},
                                {"prompt", options.prompt},
                                {"context", options.context},
                                {"generate", options.generate},
                                {"repeats", options.repeats},
                                {"load_s", loaded.load_seconds},
                                {"weight_bytes", loaded.model->weight_bytes()},
                                {"peak_memory_bytes", peak_memory},
                                {"rows", list}};
  if (ceilings) {
    out["machine"] = {{"threads", loaded.backend->info().threads},          {"read_gb_per_s", ceilings->read_gbs},
                      {"read_4k_pages_gb_per_s", ceilings->read_small_gbs}, {"fma_gflop_per_s", ceilings->fma_gflops},
                      {"bf16_dot_gflop_per_s", ceilings->bf16_gflops},      {"fp16_gflop_per_s", ceilings->fp16_gflops},
                      {"tile_gflop_per_s", ceilings->tile_gflops}};
  }
  print_indented(out);
}

void print_table(const BenchmarkOptions& options, const LoadedModel& loaded, const std::vector<BenchmarkRow>& rows,
                 size_t peak_memory, const Ceilings& ceilings) {
  fmt::print("{}\n", loaded.backend->info().device);
  fmt::print("prefill: prompts of {} tokens; decode: {} tokens from a context of {}; medians of {}\n\n", options.prompt,
             options.generate, options.context, options.repeats);
  fmt::print("{:<8} {:<9} {:>5} {:>11} {:>10} {:>13} {:>14}   microseconds a step\n", "test", "precision", "batch",
             "tokens/s", "step ms", "weights GB/s", "GFLOP/s");
  for (const BenchmarkRow& row : rows) {
    const double read = ceilings ? ceilings->read_gbs : 0;
    const double arithmetic = ceilings ? arithmetic_ceiling(*ceilings, loaded, row.precision) : 0;
    fmt::print("{:<8} {:<9} {:>5} {:>11.1f} {:>10.3f} {:>13} {:>14}  ", row.test, name_of(row.precision), row.batch,
               row.tokens_per_s, row.step_ms, with_share(row.weight_gb_per_s, read),
               with_share(row.gflop_per_s, arithmetic));
    for (const StageTime& stage : row.stages) fmt::print(" {} {:.0f}", stage.stage, stage.seconds * 1e6);
    fmt::print("\n");
  }
  fmt::print("\nweights {} (one copy); load {:.2f} s; peak memory {}\n", human_bytes(loaded.model->weight_bytes()),
             loaded.load_seconds, human_bytes(peak_memory));
  if (!ceilings) return;
  fmt::print(
      "this machine on {} threads: reads {:.1f} GB/s from huge pages ({:.1f} from 4 KB pages), FP32 {:.0f} GFLOP/s",
      loaded.backend->info().threads, ceilings->read_gbs, ceilings->read_small_gbs, ceilings->fma_gflops);
  if (ceilings->bf16_gflops > 0) fmt::print(", BF16 dot products {:.0f} GFLOP/s", ceilings->bf16_gflops);
  if (ceilings->tile_gflops > 0) fmt::print(", AMX tiles {:.0f} GFLOP/s", ceilings->tile_gflops);
  if (ceilings->fp16_gflops > 0) fmt::print(", FP16 multiply-adds {:.0f} GFLOP/s", ceilings->fp16_gflops);
  fmt::print("\n");
}

nlohmann::ordered_json report_head(const LoadedModel& loaded, const std::optional<DeviceLimits>& limits) {
  nlohmann::ordered_json head = {{"model", loaded.name},
                                 {"device", loaded.backend->info().device},
                                 {"load_s", loaded.load_seconds},
                                 {"weight_bytes", loaded.model->weight_bytes()}};
  if (limits) {
    head["limits"] = {{"source", limits->source},
                      {"read_bytes_per_s", limits->read_bytes_per_s},
                      {"fp16_flop_per_s", limits->fp16_flop_per_s},
                      {"fp8_weights_flop_per_s", limits->fp8_weights_flop_per_s},
                      {"fp8_flop_per_s", limits->fp8_flop_per_s}};
  }
  return head;
}

std::optional<DeviceLimits> device_limits(const LoadedModel& loaded, const Ceilings& ceilings) {
  if (!ceilings) return data_sheet_limits(loaded.backend->info().device);
  return DeviceLimits{"measured", ceilings->read_gbs * 1e9,
                      arithmetic_ceiling(*ceilings, loaded, Precision::kFp16) * 1e9,
                      arithmetic_ceiling(*ceilings, loaded, Precision::kFp8) * 1e9,
                      arithmetic_ceiling(*ceilings, loaded, Precision::kFp8W8A8) * 1e9};
}

}  // namespace nfp
