// Answers a prompt twice from one copy of the weights: nestedfp_user MODEL PROMPT
#include <cstdio>
#include <cstdlib>

#include "runtime/loaded_model.h"

namespace {

[[noreturn]] void fail(const nfp::Error& error) {
  std::fprintf(stderr, "error: %s\n", error.message.c_str());
  std::exit(1);
}

template <typename T>
T need(nfp::Result<T> result) {
  if (!result.ok()) fail(result.error());
  return std::move(result).value();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: nestedfp_user MODEL PROMPT\n");
    return 2;
  }
  const auto loaded = need(nfp::load(argv[1], {}));
  const auto serving = need(nfp::make_engine(*loaded, {}, need(nfp::parse_policy("fp16"))));
  for (const char* precision : {"fp16", "fp8"}) {
    serving.engine->set_policy(need(nfp::parse_policy(precision)));
    nfp::Request request;
    request.id = precision;
    request.prompt = need(loaded->tokenizer->encode(argv[2]));
    request.sampling.temperature = 0;
    request.sampling.max_tokens = 8;
    request.sampling.ignore_eos = true;
    if (const nfp::Status status = serving.engine->submit(std::move(request)); !status.ok()) fail(status.error());
    std::printf("%s:", precision);
    while (!serving.engine->idle()) {
      for (const nfp::RequestOutput& output : serving.engine->step()) {
        if (output.finish == nfp::FinishReason::kError) fail({output.error_code, output.error});
        for (const nfp::OutputToken& token : output.tokens) std::printf(" %d", token.token);
      }
    }
    std::printf("\n");
  }
  return 0;
}
