// Predicted times of steps.
#include "policy/step_model.h"

#include <fmt/format.h>

#include <limits>

#include "base/mapped_file.h"
#include "capi/status.h"

using nfp::capi::complete;
using nfp::capi::fail;
using nfp::capi::guarded;

struct nfp_step_model {
  nfp::StepModel model;
};

namespace {

nfp_status check_level(const char* what, const nfp_step_model& model, int32_t level) {
  NFP_CAPI_REQUIRE(level >= 0 && static_cast<size_t>(level) < model.model.levels().size(),
                   "{}: level {}: the table has {}", what, level, model.model.levels().size());
  return NFP_OK;
}

}  // namespace

extern "C" {

nfp_status nfp_step_model_load(const char* file, nfp_step_model** model) {
  return guarded([&]() -> nfp_status {
    NFP_CAPI_REQUIRE(file != nullptr && model != nullptr, "nfp_step_model_load: a pointer is null");
    const auto text = nfp::read_text_file(file);
    if (!text.ok()) return fail(text.error());
    const auto table = nfp::parse_step_table(*text, file);
    if (!table.ok()) return fail(table.error());
    auto fitted = nfp::StepModel::fit(*table);
    if (!fitted.ok()) return fail(nfp::error(fitted.error().code, "{}: {}", file, fitted.error().message));
    *model = new nfp_step_model{std::move(fitted).value()};
    return NFP_OK;
  });
}

void nfp_step_model_destroy(nfp_step_model* model) { delete model; }

int32_t nfp_step_model_levels(const nfp_step_model* model) {
  return model == nullptr ? 0 : static_cast<int32_t>(model->model.levels().size());
}

nfp_status nfp_step_model_level(const nfp_step_model* model, int32_t level, nfp_step_level* found) {
  return guarded([&]() -> nfp_status {
    NFP_CAPI_REQUIRE(model != nullptr && complete(found),
                     "nfp_step_model_level: a pointer is null, or found->size is not sizeof(nfp_step_level)");
    if (const nfp_status checked = check_level("nfp_step_model_level", *model, level); checked != NFP_OK)
      return checked;
    const nfp::StepLevel& known = model->model.levels()[static_cast<size_t>(level)];
    found->precision = nfp::is_exact(known.precision) ? NFP_PRECISION_FP16 : NFP_PRECISION_FP8;
    found->fp8_share = known.fp8_share;
    *fmt::format_to_n(found->name, sizeof(found->name) - 1, "{}", known.name()).out = '\0';
    return NFP_OK;
  });
}

nfp_status nfp_step_model_seconds(const nfp_step_model* model, int32_t level, const nfp_step_work* work,
                                  double* seconds) {
  return guarded([&]() -> nfp_status {
    constexpr char kCall[] = "nfp_step_model_seconds";
    NFP_CAPI_REQUIRE(model != nullptr && complete(work) && seconds != nullptr,
                     "{}: a pointer is null, or work->size is not sizeof(nfp_step_work)", kCall);
    NFP_CAPI_REQUIRE(work->sequences > 0 && work->tokens != nullptr && work->contexts != nullptr,
                     "{}: sequences must be positive, and tokens and contexts not null", kCall);
    if (const nfp_status checked = check_level(kCall, *model, level); checked != NFP_OK) return checked;
    nfp::StepWork step;
    for (int32_t s = 0; s < work->sequences; ++s) {
      const int32_t tokens = work->tokens[s], context = work->contexts[s];
      NFP_CAPI_REQUIRE(tokens >= 1 && tokens <= std::numeric_limits<int32_t>::max() - step.tokens,
                       "{}: tokens[{}] is {}; at least 1, and all together within 31 bits", kCall, s, tokens);
      NFP_CAPI_REQUIRE(context >= 0 && context <= std::numeric_limits<int32_t>::max() - tokens,
                       "{}: contexts[{}] is {}; at least 0, with tokens within 31 bits", kCall, s, context);
      step.add(tokens, context);
    }
    step.apart = work->exact_singles != 0;
    NFP_CAPI_REQUIRE(!step.apart || model->model.exact_level() < model->model.levels().size(),
                     "{}: exact_singles: the table has no FP16 level", kCall);
    *seconds = model->model.seconds(static_cast<size_t>(level), step);
    return NFP_OK;
  });
}

}  // extern "C"
