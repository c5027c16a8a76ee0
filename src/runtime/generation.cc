#include "runtime/generation.h"

#include <utility>

namespace nfp {

Result<Generation> generate(Engine& engine, Request request, const GenerationCallback& on_output,
                            const std::atomic<bool>* stop) {
  Generation result;
  const std::string id = request.id;
  const auto start = EngineClock::now();
  auto first = start;
  auto last = start;
  NFP_RETURN_IF_ERROR(engine.submit(std::move(request)));
  while (!engine.idle()) {
    if (stop != nullptr && stop->load(std::memory_order_relaxed)) engine.cancel(id);
    for (RequestOutput& output : engine.step()) {
      if (output.finish == FinishReason::kError) return Error{output.error_code, output.error};
      const auto now = EngineClock::now();
      if (!output.tokens.empty()) {
        if (result.tokens.empty()) first = now;
        last = now;
      }
      if (on_output) on_output(output);
      result.text += output.text;
      result.usage = output.usage;
      if (output.finish) result.finish = *output.finish;
      for (OutputToken& token : output.tokens) result.tokens.push_back(std::move(token));
    }
  }
  GenerationTimes& times = result.times;
  times.ttft_s = std::chrono::duration<double>(first - start).count();
  times.decode_s = std::chrono::duration<double>(last - first).count();
  const int32_t computed = result.usage.prompt_tokens - result.usage.cached_tokens;
  if (times.ttft_s > 0) times.prefill_tokens_per_s = computed / times.ttft_s;
  if (times.decode_s > 0) times.decode_tokens_per_s = static_cast<double>(result.tokens.size() - 1) / times.decode_s;
  return result;
}

}  // namespace nfp
