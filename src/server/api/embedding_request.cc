#include "server/api/embedding_request.h"

namespace nfp::server {

MaybeError parse_pooling(std::string_view text, std::string_view param, std::optional<Pooling>* out) {
  if (text == "last") {
    *out = Pooling::kLast;
  } else if (text == "mean") {
    *out = Pooling::kMean;
  } else {
    return bad_request(std::string(param), fmt::format("'{}' must be last or mean", param));
  }
  return std::nullopt;
}

MaybeError parse_embedding(const Json& body, const RequestLimits& limits, EmbeddingRequest* out) {
  Fields fields(body);
  GenerationRequest& common = out->common;
  common.no_output = true;
  NFP_API_TRY(fields.get("model", &common.model));
  const Json* input = fields.find("input");
  const Json* messages = fields.find("messages");
  if ((input == nullptr) == (messages == nullptr)) {
    return bad_request("input", input == nullptr ? "'input' is missing, and so is 'messages'"
                                                 : "'input' and 'messages' exclude each other");
  }
  bool add_special = input != nullptr;  // templates write their own
  if (input != nullptr) {
    NFP_API_TRY(parse_prompt(*input, "input", limits, &common.prompts));
  } else {
    common.chat = true;
    common.add_generation_prompt = false;
    NFP_API_TRY(parse_messages(*messages, limits, &common.messages, &common.ignored));
    NFP_API_TRY(parse_turn(fields, &common));
    NFP_API_TRY(parse_template_variables(fields, &common.template_variables));
  }
  NFP_API_TRY(fields.get("add_special_tokens", &add_special));
  common.add_special_tokens = add_special;
  std::string format = "float";
  NFP_API_TRY(fields.get("encoding_format", &format));
  if (format != "float" && format != "base64") {
    return bad_request("encoding_format", "'encoding_format' must be float or base64");
  }
  out->base64 = format == "base64";
  if (fields.find("dimensions") != nullptr) {
    int dimensions = 0;
    NFP_API_TRY(fields.get("dimensions", 1, INT32_MAX, &dimensions));
    out->dimensions = dimensions;
  }
  NFP_API_TRY(fields.get("normalize", &out->normalize));
  std::string pooling;
  NFP_API_TRY(fields.get("pooling", &pooling));
  if (!pooling.empty()) NFP_API_TRY(parse_pooling(pooling, "pooling", &out->pooling));
  NFP_API_TRY(parse_serving(fields, &common));
  std::string dtype, endianness;
  NFP_API_TRY(fields.get("embed_dtype", &dtype));
  if (!dtype.empty() && dtype != "float32") {
    return bad_request("embed_dtype", "'embed_dtype' must be float32", "unsupported_parameter");
  }
  NFP_API_TRY(fields.get("endianness", &endianness));
  if (!endianness.empty() && endianness != "little" && endianness != "native") {
    return bad_request("endianness", "'endianness' must be little or native", "unsupported_parameter");
  }
  for (const std::string_view name : {"chat_template", "mm_processor_kwargs"}) {
    NFP_API_TRY(fields.unsupported(name, "this server does not implement it; leave it out"));
  }
  return fields.rest(limits, &common.ignored);
}

}  // namespace nfp::server
