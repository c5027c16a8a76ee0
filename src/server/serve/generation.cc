#include "server/serve/generation.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/log.h"
#include "engine/allowed_tokens.h"
#include "server/api/json_schema.h"
#include "server/api/json_text.h"
#include "server/serve/messages_writer.h"
#include "server/serve/response_writer.h"
#include "server/serve/responses_writer.h"
#include "server/tools/parameter_schema.h"
#include "text/bad_word.h"
#include "text/unicode.h"

namespace nfp::server {
namespace {

using Clock = std::chrono::steady_clock;

double ms_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double, std::milli>(to - from).count();
}

// A call of this function, or (no name) a list of calls of any of them.
GrammarSpec forced_call_grammar(const GenerationRequest& request) {
  GrammarSpec spec;
  spec.kind = GrammarSpec::Kind::kJsonSchema;
  spec.param = "tool_choice";
  if (request.tool_choice == ToolChoice::kNamed) {
    for (const Json& tool : request.tools) {
      if (tool["function"]["name"] != request.tool_name) continue;
      const Json schema = arguments_schema(tool["function"]);
      spec.unenforced = unenforced_keywords(schema);
      spec.text = dump(schema);
    }
    return spec;
  }
  spec.unenforced = request.unenforced;
  Json calls = Json::array(), definitions = Json::object();
  for (const Json& tool : request.tools) {
    const Json& function = tool["function"];
    // References within a tool's schema are from its root.
    const std::string name = fmt::format("tool{}", calls.size());
    definitions[name] = with_references_below(arguments_schema(function), "/$defs/" + name);
    calls.push_back(
        {{"type", "object"},
         {"properties", {{"name", {{"const", function["name"]}}}, {"parameters", {{"$ref", "#/$defs/" + name}}}}},
         {"required", {"name", "parameters"}},
         {"additionalProperties", false}});
  }
  Json schema = {{"type", "array"}, {"minItems", 1}, {"items", {{"anyOf", calls}}}, {"$defs", definitions}};
  if (!request.parallel_tool_calls) schema["maxItems"] = 1;
  spec.text = dump(schema);
  return spec;
}

std::unique_ptr<AnswerWriter> make_writer(const GenerationRequest& request, ServerState& state) {
  const auto created =
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
  if (request.api == TextApi::kResponses) {
    return std::make_unique<ResponsesWriter>(&request, &state.model, &state.responses, ResponseStore::make_id(),
                                             created);
  }
  const std::string id = fmt::format("{:016x}{:08x}", state.instance, ++state.serial);
  if (request.api == TextApi::kMessages) {
    return std::make_unique<MessagesWriter>(&request, &state.model, "msg_" + id, created);
  }
  return std::make_unique<ResponseWriter>(&request, &state.model, (request.chat ? "chatcmpl-" : "cmpl-") + id, created);
}

// What the engine holds of them for one choice. Whoever looks for a stop string keeps where to go on from, for each of
// its bytes.
uint64_t bytes_of(const SamplingParams& sampling) {
  uint64_t bytes = sampling.logit_bias.size() * sizeof(sampling.logit_bias.front()) +
                   2 * sampling.stop_token_ids.size() * sizeof(int32_t);
  for (const std::string& stop : sampling.stop) bytes += stop.size() * (2 + sizeof(size_t));
  return bytes;
}

const char* prompt_field(const GenerationRequest& request) {
  if (request.api == TextApi::kResponses) return "input";
  return request.chat ? "messages" : "prompt";
}

// The text of the last message, where the answer is taken to be of the same role, as vLLM takes it.
std::string continued_message(const GenerationRequest& request) {
  const Json& last = request.messages.back();
  if (request.add_generation_prompt && last["role"] != "assistant") return "";
  const auto content = last.find("content");
  return content != last.end() && content->is_string() ? content->get<std::string>() : "";
}

// Anthropic's errors have no code: its clients know a prompt that is too long by these words.
constexpr std::string_view kAnthropicTooLong = "prompt is too long: ";

ApiError prompt_error(const Error& error, const GenerationRequest& request) {
  ApiError failure = from_engine(error);
  failure.param = prompt_field(request);
  if (error.code == ErrorCode::kInvalidInput) {
    failure.code = "context_length_exceeded";
    if (request.api == TextApi::kMessages) failure.message.insert(0, kAnthropicTooLong);
  }
  return failure;
}

// As OpenAI says it, and Anthropic.
ApiError too_long(const GenerationRequest& request, size_t tokens, int32_t wanted, int32_t context) {
  const char* field = prompt_field(request);
  std::string message;
  if (request.api != TextApi::kMessages) {
    message = fmt::format(
        "This model's maximum context length is {} tokens. However, you requested {} tokens ({} in the {}, {} in the "
        "completion). Please reduce the length of the {} or completion.",
        context, static_cast<int64_t>(tokens) + wanted, tokens, field, wanted, field);
  } else if (tokens >= static_cast<size_t>(context)) {
    message = fmt::format("{}{} tokens > {} maximum", kAnthropicTooLong, tokens, context - 1);
  } else {
    message = fmt::format(
        "input length and `max_tokens` exceed context limit: {} + {} > {}, decrease input length or `max_tokens` and "
        "try again",
        tokens, wanted, context);
  }
  return bad_request(field, std::move(message), "context_length_exceeded");
}

std::string_view endpoint_of(const GenerationRequest& request) {
  if (request.api == TextApi::kResponses) return "responses";
  if (request.api == TextApi::kMessages) return "messages";
  return request.chat ? "chat" : "completions";
}

}  // namespace

Generation::Generation(ServerState* state, RequestContext context, GenerationRequest request)
    : LiveRequest(state, std::move(context)), request_(std::move(request)), writer_(make_writer(request_, *state)) {
  grammar_ = forced_call() ? forced_call_grammar(request_) : std::move(request_.grammar);
  if (!grammar_.unenforced.empty()) {
    headers_.push_back({"X-NestedFP-Unenforced", fmt::format("{}", fmt::join(grammar_.unenforced, ", "))});
    log::warn("request={} '{}' has keywords that are not enforced: {}", request_id_, grammar_.param,
              fmt::join(grammar_.unenforced, ", "));
  }
  state_->model.tell_unread(&request_);
}

bool Generation::scores_echo() const { return request_.echo && !request_.chat && request_.wants_logprobs; }

bool Generation::forced_call() const {
  return request_.tool_choice == ToolChoice::kRequired || request_.tool_choice == ToolChoice::kNamed;
}

void Generation::prepared(MaybeError failure, bool on_worker) {
  if (!failure && grammar_.kind != GrammarSpec::Kind::kNone) {
    prepared_.constraint = state_->grammars->find(grammar_);
    if (!prepared_.constraint) return compile(on_worker);
  }
  go_on(std::move(failure), on_worker);
}

void Generation::compile(bool on_worker) {
  const bool taken = state_->grammar_workers->submit(
      [self = self()](const std::stop_token& stop) {
        auto compiled = self->state_->grammars->compile(self->grammar_, stop);
        MaybeError failure;
        if (compiled.ok()) {
          self->prepared_.constraint = std::move(*compiled);
        } else {
          failure = from_engine(compiled.error());
          failure->param = self->grammar_.param;
          if (compiled.error().code == ErrorCode::kUnsupported) failure->code = "unsupported_parameter";
        }
        self->go_on(std::move(failure), /*on_worker=*/true);
      },
      stop_);
  if (!taken) go_on(ApiError{429, "too many grammars wait to be compiled; try again later", "", ""}, on_worker);
}

// On a worker or the exchange's thread.
MaybeError Generation::prepare() {
  const ServedModel& model = state_->model;
  const std::stop_token stop = stop_.get_token();
  if (request_.chat) {
    const bool tools = request_.tool_choice != ToolChoice::kNone;
    if (request_.tool_choice == ToolChoice::kAuto && state_->tool_format == ToolFormat::kNone) {
      return bad_request("tools",
                         "this model's way of calling tools is not known; start the server with "
                         "--tool-call-parser, or send tool_choice none");
    }
    auto text = model.render_chat(request_, tools, stop);
    if (!text.ok()) {
      ApiError failure = from_engine(text.error());
      failure.param = prompt_field(request_);
      return failure;
    }
    const ReasoningMarks marks = marks_of(state_->reasoning_format);
    const size_t end = text->find_last_not_of(" \n\t\r");
    prepared_.thinking = !marks.open.empty() && end != std::string::npos &&
                         std::string_view(*text).substr(0, end + 1).ends_with(marks.open);
    // Templates write their own special tokens.
    auto tokens = model.encode(*text, request_.add_special_tokens.value_or(false), stop);
    if (!tokens.ok()) return prompt_error(tokens.error(), request_);
    prepared_.prompts.push_back(std::move(*tokens));
    prepared_.prompt_texts.push_back(request_.echo ? continued_message(request_) : "");
  }
  for (const PromptInput& input : request_.prompts) {
    if (!input.text) {
      prepared_.prompts.push_back(input.tokens);
      prepared_.prompt_texts.push_back(request_.echo ? model.tokenizer().decode(input.tokens, false) : "");
      continue;
    }
    auto tokens = model.encode_prompt(*input.text, request_.add_special_tokens.value_or(true), stop);
    if (!tokens.ok()) return prompt_error(tokens.error(), request_);
    prepared_.prompts.push_back(std::move(*tokens));
    prepared_.prompt_texts.push_back(request_.echo ? *input.text : "");
  }

  NFP_API_TRY(choose_allowed_tokens());

  if (request_.truncate_prompt) {
    std::vector<size_t> sizes;
    for (const auto& prompt : prepared_.prompts) sizes.push_back(prompt.size());
    NFP_API_TRY(truncate_prompts(request_, model.bounds().max_context, &prepared_.prompts));
    for (size_t i = 0; request_.echo && !request_.chat && i < sizes.size(); ++i) {
      const auto& prompt = prepared_.prompts[i];
      if (prompt.size() < sizes[i]) prepared_.prompt_texts[i] = model.tokenizer().decode(prompt, false);
    }
  }
  for (const auto& prompt : prepared_.prompts) {
    auto bad = validate(prompt, request_.sampling, model.bounds(), Pooling::kNone, request_.no_output);
    if (!bad) continue;
    if (!bad->too_long) return bad_request(std::move(bad->field), std::move(bad->message));
    return too_long(request_, prompt.size(), request_.wanted_tokens(), model.bounds().max_context);
  }
  return std::nullopt;
}

MaybeError Generation::choose_allowed_tokens() {
  const ServedModel& model = state_->model;
  const std::vector<int32_t> ids = std::exchange(request_.allowed_token_ids, {});
  const std::vector<std::string> texts = std::exchange(request_.bad_words, {});
  if (ids.empty() && texts.empty()) return std::nullopt;
  std::vector<std::vector<int32_t>> words;
  for (size_t i = 0; i < texts.size(); ++i) {
    auto tokens = bad_word_tokens(model.tokenizer(), texts[i], stop_.get_token());
    if (!tokens.ok()) {
      ApiError failure = from_engine(tokens.error());
      failure.param = fmt::format("bad_words[{}]", i);
      failure.message = fmt::format("'{}': {}", failure.param, failure.message);
      return failure;
    }
    std::move(tokens->begin(), tokens->end(), std::back_inserter(words));
  }
  auto bad = AllowedTokens::make(ids, std::move(words), model.bounds().vocab, &request_.sampling.allowed);
  if (!bad) return std::nullopt;
  return bad_request(std::move(bad->field), std::move(bad->message));
}

void Generation::run() {
  if (ended_ || exchange_->aborted()) return;
  if (state_->log_prompts) {
    for (const auto& prompt : prepared_.prompts) {
      log::info("request={} prompt={}", request_id_, dump(Json(state_->model.tokenizer().decode(prompt, false))));
    }
  }
  if (auto failure = submit_all()) {
    cancel_all();
    return fail(*failure);
  }
  prepared_ = {};  // the engine has its own
  state_->metrics->on_request(request_.n);
  watch_client();
  if (request_.stream && !state_->refuses_late) start_stream();
}

void Generation::start_stream() {
  if (std::exchange(streaming_, true)) return;
  http::Response head;
  head.content_type = "text/event-stream; charset=utf-8";
  head.headers = headers_;
  head.headers.push_back({"Cache-Control", "no-cache"});
  head.headers.push_back({"X-Accel-Buffering", "no"});
  exchange_->start(std::move(head));
}

// Who separates thoughts and calls from the answer. `needs_special`: marks of these may be special tokens.
void Generation::set_parser(Choice& choice, bool* needs_special) const {
  if (!request_.chat) return;
  if (forced_call()) {
    choice.parser = make_forced_call_parser(request_.tool_name);
    *needs_special = true;
    return;
  }
  if (request_.tool_choice == ToolChoice::kAuto) {
    choice.parser = make_tool_call_parser(state_->tool_format, &request_.tools);
  } else if (state_->reasoning_format == ReasoningFormat::kHarmony) {
    choice.parser = make_tool_call_parser(ToolFormat::kHarmony);
  }
  *needs_special = choice.parser != nullptr;
  const ReasoningMarks marks = marks_of(state_->reasoning_format);
  // What follows a grammar has no thoughts in it.
  if (marks.open.empty() || grammar_.kind != GrammarSpec::Kind::kNone) return;
  choice.parser = make_reasoning_parser(state_->reasoning_format, prepared_.thinking, std::move(choice.parser));
  const auto mark = state_->model.tokenizer().token_to_id(marks.open);
  *needs_special = *needs_special || (mark && state_->model.tokenizer().is_special(*mark));
}

MaybeError Generation::submit_all() {
  const auto samples = static_cast<size_t>(request_.best_of);
  // Each choice has its prompt as a request, as a sequence and, where they are asked for, as text or ids.
  const uint64_t others = bytes_of(request_.sampling);
  uint64_t copies = request_.sampling.allowed ? request_.sampling.allowed->bytes() : 0;  // that one they share
  for (size_t p = 0; p < prepared_.prompts.size(); ++p) {
    const size_t arrays = request_.return_token_ids ? 3 : 2;
    const uint64_t prompt = prepared_.prompts[p].size() * sizeof(int32_t) * arrays + prepared_.prompt_texts[p].size();
    copies += samples * (prompt + others);
  }
  if (!lease_.resize(lease_.bytes() + copies)) {
    return ApiError{429, "the server holds as many bytes of requests as it may; try again later", "", ""};
  }
  bool needs_special = false;
  choices_.reserve(prepared_.prompts.size() * samples);
  for (size_t p = 0; p < prepared_.prompts.size(); ++p) {
    for (size_t s = 0; s < samples; ++s) {
      Choice& choice = choices_.emplace_back();
      choice.prompt = p;
      choice.sample = static_cast<int>(s);
      choice.index = static_cast<int>(p * samples + s);
      choice.engine_id = fmt::format("{}-{}", writer_->id(), choice.index);
      choice.stop_reason = "null";
      choice.usage.prompt_tokens = static_cast<int32_t>(prepared_.prompts[p].size());
      if (request_.echo) choice.prompt_text = prepared_.prompt_texts[p];
      if (!request_.stream) choice.logprobs.offset = static_cast<int64_t>(text::count_code_points(choice.prompt_text));
      if (request_.return_token_ids) choice.prompt_ids = prepared_.prompts[p];
      set_parser(choice, &needs_special);
    }
  }
  unfinished_ = choices_.size();
  const auto most = static_cast<size_t>(state_->engine->max_queue());
  if (choices_.size() > most) {
    return bad_request(
        "n", fmt::format("the request wants {} answers, and the queue of this server holds {}", choices_.size(), most));
  }
  const PrefixKey scope = state_->cache_scopes.of(request_.key, request_.cache_salt);
  std::vector<EngineThread::Submission> submissions;
  submissions.reserve(choices_.size());
  for (size_t i = 0; i < choices_.size(); ++i) {
    const Choice& choice = choices_[i];
    Request request;
    request.id = choice.engine_id;
    request.prompt = prepared_.prompts[choice.prompt];
    request.sampling = request_.sampling;
    request.prompt_only = request_.no_output;
    SamplingParams& sampling = request.sampling;
    if (sampling.seed) *sampling.seed += static_cast<uint64_t>(choice.sample);
    sampling.logprobs = request_.wants_logprobs || request_.best_of > request_.n;
    sampling.top_logprobs = request_.wants_logprobs ? request_.top_logprobs : 0;
    // For all of a prompt's choices; respond_whole() gives them to the others. A stream tells each choice's echo as it
    // comes.
    if (choice.sample == 0 || request_.stream) {
      sampling.prompt_logprobs = request_.prompt_logprobs;
      if (scores_echo()) {
        sampling.prompt_logprobs = std::max(request_.top_logprobs, request_.prompt_logprobs.value_or(0));
      }
    }
    request.precision = request_.precision.value_or(state_->default_precision);
    if (request_.slo_ttft_ms) request.slo_ttft_s = *request_.slo_ttft_ms / 1e3;
    if (request_.slo_itl_ms) request.slo_itl_s = *request_.slo_itl_ms / 1e3;
    request.priority = request_.priority;
    request.arrival = EngineClock::now();  // the engine may be in the middle of a step
    request.skip_special_tokens = request_.skip_special_tokens && !needs_special;
    // No mark, and no part of a call's arguments.
    request.skip_special_end = request_.skip_special_tokens || forced_call();
    request.cache_scope = scope;
    if (prepared_.constraint) {
      request.constraint = prepared_.constraint->instantiate();
      if (request_.call_or_grammar) {
        request.constraint =
            or_call(std::move(request.constraint), opening_mark(state_->tool_format), state_->model.tokenizer());
      }
      if (sampling.min_tokens > 0) {
        std::vector<int32_t> ends = state_->model.end_ids();
        ends.insert(ends.end(), sampling.stop_token_ids.begin(), sampling.stop_token_ids.end());
        request.constraint = with_min_tokens(std::move(request.constraint), sampling.min_tokens, std::move(ends));
      }
    }
    submissions.push_back({std::move(request), [self = self(), i](RequestOutput&& output) {
                             self->exchange_->post([self, i, piece = std::move(output)]() mutable {
                               self->guarded([&] { self->on_output(i, std::move(piece)); });
                             });
                           }});
  }
  const Status status = state_->engine->submit_all(std::move(submissions));
  if (!status.ok()) return from_engine(status.error());
  return std::nullopt;
}

void Generation::on_output(size_t index, RequestOutput output) {
  if (ended_) return;
  Choice& choice = choices_[index];
  if (output.finish == FinishReason::kError || output.finish == FinishReason::kCancelled) {
    cancel_all();
    return fail(failure_of(output));
  }
  if (first_token_ == Clock::time_point()) first_token_ = Clock::now();
  const size_t scores = scores_;
  const std::vector<ToolEvent> events = take(choice, output);
  // The lists, the answer that is made of them, and what the connection has of that. Of everything else an answer has
  // little beside its request. The last events of a response tell all of it once more.
  const bool gathers = !request_.stream || request_.api == TextApi::kResponses;
  if (gathers && !lease_.resize(lease_.bytes() + 3 * (scores_ - scores))) {
    cancel_all();
    return fail(
        ApiError{429, "the log-probabilities that this request asks for are more than the server may hold", "", ""});
  }
  if (request_.stream) {
    start_stream();
    scratch_.clear();
    if (!std::exchange(begun_, true)) {
      // All of them in their order, whichever has a token first: clients append a choice when its first event comes.
      for (Choice& each : choices_) writer_->begin(scratch_, each);
    }
    writer_->events(scratch_, choice, events, choice.finish.has_value());
    if (!scratch_.empty()) exchange_->write(scratch_);
  }
  if (ended_) return;  // the client was cut off
  if (choice.finish && --unfinished_ == 0) choice_done();
}

// Bookkeeping that both forms of answer need.
std::vector<ToolEvent> Generation::take(Choice& choice, RequestOutput& output) {
  choice.usage = output.usage;
  choice.finish = output.finish;
  if (request_.no_output) {  // the token that the engine gave is none of the answer, nor is what it ends
    choice.usage.completion_tokens = 0;
    choice.usage.completion = {};
    choice.usage.slo_met.reset();
    if (choice.finish) choice.finish = FinishReason::kLength;
    output.tokens.clear();
    output.text.clear();
    output.stop_string.reset();
    output.stop_token.reset();
  }
  if (output.stop_string) {
    choice.stop_reason.clear();
    append_string(choice.stop_reason, *output.stop_string);
  } else if (output.stop_token) {
    const auto& asked = request_.sampling.stop_token_ids;
    if (std::find(asked.begin(), asked.end(), *output.stop_token) != asked.end()) {
      choice.stop_reason = std::to_string(*output.stop_token);
    }
  }
  for (const OutputToken& token : output.tokens) choice.score += token.logprob;
  take_logprobs(choice, output);
  if (request_.return_token_ids) {
    for (const OutputToken& token : output.tokens) choice.ids.push_back(token.token);
  }
  std::vector<ToolEvent> events = read(choice, std::move(output.text));
  if (choice.now == ToolEvent::Kind::kReasoning) choice.reasoning_tokens += static_cast<int32_t>(output.tokens.size());
  if (request_.api == TextApi::kResponses) keep_logprobs_of_text(choice, events);
  if (!request_.stream) keep_parts(choice, events);
  return events;
}

void Generation::take_logprobs(Choice& choice, RequestOutput& output) {
  const auto add = [&](std::span<const OutputToken> tokens, std::optional<std::string_view> echo, LogprobLists& lists,
                       size_t shown) {
    const size_t before = lists.bytes();
    writer_->add_logprobs(tokens, echo, &lists);
    scores_ += (lists.bytes() - before) * shown;
  };
  if (!output.prompt_logprobs.empty()) {
    const auto choices = static_cast<size_t>(request_.best_of);
    if (scores_echo()) {
      add(output.prompt_logprobs, choice.prompt_text, request_.stream ? choice.logprobs : choice.echoed, choices);
    }
    if (request_.prompt_logprobs) {
      constexpr size_t kEntry = 64;  // of JSON, about
      for (const OutputToken& token : output.prompt_logprobs) scores_ += kEntry * (1 + token.top.size()) * choices;
      choice.prompt_logprobs = std::move(output.prompt_logprobs);
    }
  }
  if (!request_.wants_logprobs) return;
  std::span<const OutputToken> tokens = output.tokens;
  // An end that is not shown is none of an item's text, though text that was held back may come with it.
  const bool hidden =
      output.stop_token && (!request_.sampling.include_stop ||
                            (request_.skip_special_tokens && state_->model.tokenizer().is_special(*output.stop_token)));
  if (request_.api == TextApi::kResponses && hidden) tokens = tokens.first(tokens.size() - 1);
  add(tokens, std::nullopt, choice.logprobs, 1);
}

void Generation::keep_parts(Choice& choice, std::span<const ToolEvent> events) const {
  for (const ToolEvent& event : events) {
    if (event.kind == ToolEvent::Kind::kArguments) continue;  // choice.calls has them
    const bool call = event.kind == ToolEvent::Kind::kCall;
    if (!call && event.text.empty()) continue;
    if (call || choice.parts.empty() || choice.parts.back().kind != event.kind) {
      choice.parts.push_back({event.kind, {}, static_cast<size_t>(event.call), {}});
    }
    if (call) continue;
    AnswerPart& part = choice.parts.back();
    part.text += event.text;
    if (request_.api == TextApi::kResponses && event.kind == ToolEvent::Kind::kText) {
      choice.logprobs.move_content(&part.logprobs);
    }
  }
}

// What an item of text tells is of its own tokens: not of thoughts, calls, their marks or the end.
void Generation::keep_logprobs_of_text(Choice& choice, std::span<const ToolEvent> events) const {
  const bool has_text = std::any_of(events.begin(), events.end(), [](const ToolEvent& event) {
    return event.kind == ToolEvent::Kind::kText && !event.text.empty();
  });
  const bool may_have = !choice.parser || choice.parser->within_text();
  if (!has_text && (choice.finish || !may_have)) choice.logprobs.clear();
}

std::vector<ToolEvent> Generation::read(Choice& choice, std::string text) const {
  std::vector<ToolEvent> events;
  if (!choice.parser) {
    if (!text.empty()) events.push_back({ToolEvent::Kind::kText, std::move(text), 0});
    return events;
  }
  choice.parser->feed(text, &events);
  if (choice.finish) choice.parser->finish(&events, choice.finish == FinishReason::kLength);
  for (const ToolEvent& event : events) {
    if (event.kind == ToolEvent::Kind::kCall || !event.text.empty()) choice.now = event.kind;
  }
  if (!request_.include_reasoning) {
    std::erase_if(events, [](const ToolEvent& event) { return event.kind == ToolEvent::Kind::kReasoning; });
  }
  if (!request_.parallel_tool_calls) std::erase_if(events, [](const ToolEvent& event) { return event.call > 0; });
  for (const ToolEvent& event : events) {
    if (event.kind == ToolEvent::Kind::kCall) {
      choice.calls.push_back({make_tool_call_id(state_->tool_format), event.text, ""});
    } else if (event.kind == ToolEvent::Kind::kArguments) {
      choice.calls[static_cast<size_t>(event.call)].arguments += event.text;
    }
  }
  return events;
}

void Generation::choice_done() {
  ended_ = true;
  const auto samples = static_cast<size_t>(request_.best_of);
  for (size_t first = 0; first < choices_.size(); first += samples) {
    int32_t longest = 0;
    for (size_t i = first; i < first + samples; ++i) longest = std::max(longest, choices_[i].usage.completion_tokens);
    state_->metrics->on_answered(longest);
  }
  if (request_.stream) {
    finish_stream();
  } else {
    respond_whole();
  }
  log_end("ok");
}

void Generation::finish_stream() {
  scratch_.clear();
  writer_->end(scratch_, choices_);
  hold_lease(scratch_.size());
  exchange_->write(scratch_);
  exchange_->finish();
}

void Generation::respond_whole() {
  for (Choice& choice : choices_) {
    const Choice& scored = choices_[choice.prompt * static_cast<size_t>(request_.best_of)];
    if (choice.prompt_logprobs.empty()) choice.prompt_logprobs = scored.prompt_logprobs;
    choice.logprobs.prepend(scored.echoed);
  }
  std::vector<const Choice*> shown;
  for (const Choice& choice : choices_) shown.push_back(&choice);
  const auto n = static_cast<size_t>(request_.n);
  const auto samples = static_cast<size_t>(request_.best_of);
  if (samples > n) {
    // The n likeliest of each prompt, by mean log-probability of a token as OpenAI describes it.
    const auto mean = [](const Choice* c) { return c->score / std::max(1, c->usage.completion_tokens); };
    std::vector<const Choice*> best;
    for (size_t p = 0; p * samples < choices_.size(); ++p) {
      const auto begin = shown.begin() + static_cast<std::ptrdiff_t>(p * samples);
      std::stable_sort(begin, begin + static_cast<std::ptrdiff_t>(samples),
                       [&](const Choice* a, const Choice* b) { return mean(a) > mean(b); });
      best.insert(best.end(), begin, begin + static_cast<std::ptrdiff_t>(n));
    }
    shown = std::move(best);
    for (size_t i = 0; i < shown.size(); ++i) {
      choices_[static_cast<size_t>(shown[i] - choices_.data())].index = static_cast<int>(i);
    }
  }
  http::Response response;
  response.headers = headers_;
  response.body = writer_->whole(shown, choices_);
  hold_lease(response.body.size());
  exchange_->respond(std::move(response));
}

void Generation::cancel_all() {
  for (const Choice& choice : choices_) {
    if (!choice.finish) state_->engine->cancel(choice.engine_id);
  }
}

void Generation::fail(const ApiError& error) {
  if (std::exchange(ended_, true)) return;
  if (streaming_) {
    scratch_.clear();
    writer_->failure(scratch_, error);
    exchange_->write(scratch_);
    exchange_->finish();
  } else {
    http::Response response = writer_->refusal(error);
    response.headers.insert(response.headers.end(), headers_.begin(), headers_.end());
    exchange_->respond(std::move(response));
  }
  if (state_->log_requests) log_failure(request_id_, endpoint_of(request_), error.status, error.message);
}

void Generation::log_end(std::string_view outcome) const {
  if (!state_->log_requests) return;
  Usage sum;
  int32_t longest = 0;
  for (const Choice& choice : choices_) {
    if (choice.sample == 0) sum.prompt_tokens += choice.usage.prompt_tokens;
    sum.completion_tokens += choice.usage.completion_tokens;
    sum.completion.fp16 += choice.usage.completion.fp16;
    sum.completion.fp8 += choice.usage.completion.fp8;
    longest = std::max(longest, choice.usage.completion_tokens);
  }
  const auto now = Clock::now();
  const bool any = first_token_ != Clock::time_point();
  const double tpot = any && longest > 1 ? ms_between(first_token_, now) / (longest - 1) : 0;
  log::info(
      "request={} endpoint={} outcome={} choices={} prompt_tokens={} completion_tokens={} fp16_tokens={} fp8_tokens={} "
      "ttft_ms={:.1f} tpot_ms={:.2f} e2e_ms={:.1f}",
      request_id_, endpoint_of(request_), outcome, choices_.size(), sum.prompt_tokens, sum.completion_tokens,
      sum.completion.fp16, sum.completion.fp8, any ? ms_between(arrival_, first_token_) : 0, tpot,
      ms_between(arrival_, now));
}

}  // namespace nfp::server
