// The four pipelines of a tokenizer.json as objects: normalizer, pre_tokenizer, post_processor, decoder. Each is a
// tree of {"type": NAME, ...} where Sequence has children. Names follow the `tokenizers` package, version 0.22.
#pragma once

#include <simdjson.h>

#include <string>
#include <vector>

#include "base/result.h"
#include "text/tokenizer_parts.h"

namespace nfp::text {

using Json = simdjson::dom::element;

// Access to fields with errors that name them: "field 'model.vocab' is missing".
// `path` is the name of `object`; empty for the whole file.
std::string field_path(const std::string& path, std::string_view key);
// The field, or nothing where it is absent or null.
std::optional<Json> find_field(Json object, std::string_view key);
Result<Json> need_field(Json object, const std::string& path, std::string_view key);
Result<std::string> string_field(Json object, const std::string& path, std::string_view key);
Result<bool> bool_field(Json object, const std::string& path, std::string_view key, std::optional<bool> absent);
Result<int64_t> int_field(Json object, const std::string& path, std::string_view key);
Result<simdjson::dom::array> array_field(Json object, const std::string& path, std::string_view key);

// Errors: kInvalidInput (a field missing or of the wrong type), kUnsupported (a component by its name and path).
Status parse_normalizer(Json node, const std::string& path, int depth, Normalizer& normalizer);
// `prefix_space`: add_prefix_space of tokenizer_config.json, which transformers puts in the place of the node's own
// where that is a ByteLevel.
Status parse_pre_tokenizer(Json node, const std::string& path, int depth, std::optional<bool> prefix_space,
                           PreTokenizer& pre_tokenizer, bool& byte_level);
Status parse_post_processor(Json node, const std::string& path, int depth, std::vector<int32_t>& prefix,
                            std::vector<int32_t>& suffix);
Result<Decoder> parse_decoder(Json node, const std::string& path);

}  // namespace nfp::text
