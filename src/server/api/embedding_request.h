// What a client asks for in POST /v1/embeddings: OpenAI's fields, vLLM's and our own.
#pragma once

#include <cstdint>
#include <optional>

#include "server/api/generation_request.h"

namespace nfp::server {

struct EmbeddingRequest {
  // Its inputs are `prompts`, or the `messages` of one conversation; of the rest what says how it is served.
  GenerationRequest common;
  std::optional<Pooling> pooling;  // absent = the server's
  std::optional<int> dimensions;   // the first so many numbers of an embedding
  bool normalize = true;           // to length 1
  bool base64 = false;             // of little-endian FP32, instead of a list of numbers
};

MaybeError parse_embedding(const Json& body, const RequestLimits& limits, EmbeddingRequest* out);

// "last" or "mean"; `param` is the field or flag named in the error.
MaybeError parse_pooling(std::string_view text, std::string_view param, std::optional<Pooling>* out);

}  // namespace nfp::server
