#include "server/serve/embedding.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/log.h"
#include "server/api/json_text.h"

namespace nfp::server {

void finish_embedding(std::vector<float>& values, size_t dimensions, bool normalize) {
  values.resize(std::min(dimensions, values.size()));
  if (!normalize) return;
  double squares = 0;
  for (const float value : values) squares += static_cast<double>(value) * static_cast<double>(value);
  if (!(squares > 0)) return;
  const double scale = 1.0 / std::sqrt(squares);
  for (float& value : values) value = static_cast<float>(value * scale);
}

void append_base64(std::string& out, const std::vector<float>& values) {
  constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  uint32_t bits = 0;
  int bytes = 0;
  const auto flush = [&] {
    bits <<= 8 * (3 - bytes);
    for (int digit = 0; digit < 4; ++digit) out += digit <= bytes ? kDigits[bits >> (18 - 6 * digit) & 63u] : '=';
    bits = 0;
    bytes = 0;
  };
  out.reserve(out.size() + (values.size() * sizeof(float) + 2) / 3 * 4);
  for (const float value : values) {
    const auto word = std::bit_cast<uint32_t>(value);
    for (int byte = 0; byte < 4; ++byte) {
      bits = bits << 8 | (word >> (8 * byte) & 255u);
      if (++bytes == 3) flush();
    }
  }
  if (bytes > 0) flush();
}

Embedding::Embedding(ServerState* state, RequestContext context, EmbeddingRequest request)
    : LiveRequest(state, std::move(context)),
      request_(std::move(request)),
      id_(fmt::format("embd-{:016x}{:08x}", state->instance, ++state->serial)) {}

// On a worker or the exchange's thread.
MaybeError Embedding::prepare() {
  const ServedModel& model = state_->model;
  const GenerationRequest& common = request_.common;
  const std::stop_token stop = stop_.get_token();
  const int32_t hidden = model.bounds().hidden;
  if (request_.dimensions && *request_.dimensions > hidden) {
    return bad_request("dimensions", fmt::format("'dimensions' is {}, and this model's embeddings have {} numbers",
                                                 *request_.dimensions, hidden));
  }
  const bool special = common.add_special_tokens.value_or(true);
  const auto add = [&](std::string_view text, const char* field) -> MaybeError {
    auto tokens = model.encode_prompt(text, special, stop);
    if (!tokens.ok()) {
      ApiError failure = from_engine(tokens.error());
      failure.param = field;
      if (tokens.error().code == ErrorCode::kInvalidInput) failure.code = "context_length_exceeded";
      return failure;
    }
    prompts_.push_back(std::move(*tokens));
    return std::nullopt;
  };
  const char* field = common.chat ? "messages" : "input";
  if (common.chat) {
    auto text = model.render_chat(common, false, stop);
    if (!text.ok()) {
      ApiError failure = from_engine(text.error());
      failure.param = field;
      return failure;
    }
    NFP_API_TRY(add(*text, field));
  }
  for (const PromptInput& input : common.prompts) {
    if (input.text) {
      NFP_API_TRY(add(*input.text, field));
    } else {
      prompts_.push_back(input.tokens);
    }
  }
  const int32_t context = model.bounds().max_context;
  NFP_API_TRY(truncate_prompts(common, context, &prompts_));
  for (size_t i = 0; i < prompts_.size(); ++i) {
    auto bad = validate(prompts_[i], {}, model.bounds(), Pooling::kLast);
    if (!bad) continue;
    const std::string which = common.chat ? "the text of 'messages'" : fmt::format("entry {} of 'input'", i);
    if (!bad->too_long) return bad_request(field, fmt::format("{}: {}", which, bad->message));
    return bad_request(field,
                       fmt::format("This model's maximum context length is {} tokens. However, {} has {} tokens. "
                                   "Please reduce its length, or send 'truncate_prompt_tokens'.",
                                   context, which, prompts_[i].size()),
                       "context_length_exceeded");
  }
  const size_t numbers = prompts_.size() * static_cast<size_t>(request_.dimensions.value_or(hidden));
  // As floats, and as text of them.
  if (!lease_.resize(lease_.bytes() + numbers * (sizeof(float) + (request_.base64 ? 6 : 16)))) {
    return ApiError{429, "the server holds as many bytes of requests as it may; try again later", "", ""};
  }
  return std::nullopt;
}

void Embedding::run() {
  if (ended_ || exchange_->aborted()) return;
  if (state_->log_prompts) {
    for (const auto& prompt : prompts_) {
      log::info("request={} input={}", request_id_, dump(Json(state_->model.tokenizer().decode(prompt, false))));
    }
  }
  embeddings_.resize(prompts_.size());
  submit_more();
  if (ended_) return;
  watch_client();
}

std::string Embedding::engine_id(size_t index) const { return fmt::format("{}-{}", id_, index); }

void Embedding::submit_more() {
  const GenerationRequest& common = request_.common;
  while (submitted_ < prompts_.size() && submitted_ - done_ < kWindow) {
    const size_t index = submitted_;
    Request request;
    request.id = engine_id(index);
    request.prompt = prompts_[index];
    request.pooling = request_.pooling.value_or(state_->default_pooling);
    request.precision = common.precision.value_or(state_->default_precision);
    if (common.slo_ttft_ms) request.slo_ttft_s = *common.slo_ttft_ms / 1e3;
    request.priority = common.priority;
    request.arrival = EngineClock::now();
    request.cache_scope = state_->cache_scopes.of(common.key, common.cache_salt);
    const Status status = state_->engine->submit(std::move(request), [self = self(), index](RequestOutput&& output) {
      self->exchange_->post([self, index, piece = std::move(output)]() mutable {
        self->guarded([&] { self->on_output(index, std::move(piece)); });
      });
    });
    if (!status.ok()) {
      if (submitted_ > done_) return;
      return fail(from_engine(status.error()));
    }
    ++submitted_;
  }
}

void Embedding::on_output(size_t index, RequestOutput output) {
  if (ended_) return;
  if (output.finish != FinishReason::kStop) {
    ++done_;
    cancel_all();
    return fail(failure_of(output));
  }
  ++done_;
  embeddings_[index] = std::move(output.embedding);
  finish_embedding(embeddings_[index], static_cast<size_t>(request_.dimensions.value_or(state_->model.bounds().hidden)),
                   request_.normalize);
  usage_.prompt_tokens += output.usage.prompt_tokens;
  usage_.cached_tokens += output.usage.cached_tokens;
  usage_.prompt.fp16 += output.usage.prompt.fp16;
  usage_.prompt.fp8 += output.usage.prompt.fp8;
  if (output.usage.slo_met) usage_.slo_met = usage_.slo_met.value_or(true) && *output.usage.slo_met;
  if (done_ == prompts_.size()) return respond();
  submit_more();
}

void Embedding::respond() {
  ended_ = true;
  std::string out = "{\"id\":\"" + id_ + "\",\"object\":\"list\",\"data\":[";
  for (size_t i = 0; i < embeddings_.size(); ++i) {
    fmt::format_to(std::back_inserter(out),
                   "{}{{\"object\":\"embedding\",\"index\":{},\"embedding\":", i > 0 ? "," : "", i);
    if (request_.base64) {
      out += '"';
      append_base64(out, embeddings_[i]);
      out += "\"}";
    } else {
      out += '[';
      for (size_t j = 0; j < embeddings_[i].size(); ++j) {
        if (j > 0) out += ',';
        append_number(out, embeddings_[i][j]);
      }
      out += "]}";
    }
    embeddings_[i] = {};
  }
  out += "],\"model\":";
  append_string(out, state_->model.name());
  fmt::format_to(
      std::back_inserter(out),
      ",\"created\":{},\"usage\":{{\"prompt_tokens\":{},\"total_tokens\":{},\"prompt_tokens_details\":{{"
      "\"cached_tokens\":{}}},\"nestedfp\":{{\"prompt\":{{\"fp16_tokens\":{},\"fp8_tokens\":{}}}{}}}}}}}",
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count(),
      usage_.prompt_tokens, usage_.prompt_tokens, usage_.cached_tokens, usage_.prompt.fp16, usage_.prompt.fp8,
      !usage_.slo_met   ? ""
      : *usage_.slo_met ? ",\"slo_met\":true"
                        : ",\"slo_met\":false");
  http::Response response;
  response.headers = headers_;
  response.body = std::move(out);
  hold_lease(response.body.size());
  exchange_->respond(std::move(response));
  log_end("ok");
}

void Embedding::cancel_all() {
  for (size_t i = 0; i < submitted_; ++i) {
    if (embeddings_[i].empty()) state_->engine->cancel(engine_id(i));
  }
}

void Embedding::fail(const ApiError& error) {
  if (std::exchange(ended_, true)) return;
  http::Response response = error_response(error);
  response.headers.insert(response.headers.end(), headers_.begin(), headers_.end());
  exchange_->respond(std::move(response));
  if (state_->log_requests) log_failure(request_id_, "embeddings", error.status, error.message);
}

void Embedding::log_end(std::string_view outcome) const {
  if (!state_->log_requests) return;
  log::info(
      "request={} endpoint=embeddings outcome={} inputs={} prompt_tokens={} fp16_tokens={} fp8_tokens={} e2e_ms={:.1f}",
      request_id_, outcome, request_.common.chat ? 1 : request_.common.prompts.size(), usage_.prompt_tokens,
      usage_.prompt.fp16, usage_.prompt.fp8,
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - arrival_).count());
}

}  // namespace nfp::server
