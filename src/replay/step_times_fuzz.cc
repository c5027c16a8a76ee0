// A file of step times, in either form, from its bytes to predictions, which must be finite, not negative, and never
// fall when a step grows.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "policy/step_model.h"
#include "replay/step_source.h"

namespace {

void predict(const nfp::StepTable& table) {
  // What a fit takes grows with the product of the two; this is about the text, not about long tables.
  if (table.steps.size() > 200 || table.levels.size() > 20) return;
  const auto model = nfp::StepModel::fit(table);
  if (!model.ok()) return;
  for (const double share : {0.0, 0.5, 1.0}) {
    const double shares[] = {share};
    const nfp::StepModel at = model->at_shares(shares);
    for (size_t level = 0; level < at.levels().size(); ++level) {
      double before = 0;
      for (int32_t tokens = 1; tokens <= (1 << 20); tokens *= 32) {
        nfp::StepWork work;
        work.add(tokens, tokens);
        const double seconds = at.seconds(level, work);
        if (!std::isfinite(seconds) || seconds < before * (1 - 1e-9)) __builtin_trap();
        before = seconds;
      }
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (const auto rows = nfp::parse_step_rows(text, "steps.json", {}); rows.ok()) predict(*rows);
  const auto table = nfp::parse_step_table(text, "steps.json");
  if (!table.ok()) return 0;
  const auto again = nfp::parse_step_table(nfp::to_json_text(*table), "again");
  if (!again.ok() || again->steps != table->steps) __builtin_trap();
  predict(*table);
  return 0;
}
