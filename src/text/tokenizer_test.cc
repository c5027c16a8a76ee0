#include "text/tokenizer.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "text/detokenizer.h"
#include "text/testing/small_tokenizers.h"

namespace nfp {
namespace {

using text::byte_id;
using text::byte_level_json;
using text::load;
using text::sentencepiece_json;
using text::TokenizerJson;
using Ids = std::vector<int32_t>;

Ids encode(const Tokenizer& tokenizer, std::string_view text, const EncodeOptions& options = {}) {
  auto ids = tokenizer.encode(text, options);
  EXPECT_TRUE(ids.ok()) << ids.error().message;
  return ids.ok() ? *ids : Ids{};
}

std::string from_json_error(const TokenizerFiles& files) {
  const auto tokenizer = Tokenizer::from_json(files, "t");
  return tokenizer.ok() ? "" : tokenizer.error().message;
}

TEST(Tokenizer, ByteLevel) {
  const auto tokenizer = load(byte_level_json());
  const int32_t he = *tokenizer->token_to_id("he");
  const int32_t hell = *tokenizer->token_to_id("hell");
  EXPECT_EQ(encode(*tokenizer, "hello he"), (Ids{hell, byte_id('o'), he + 1}));
  EXPECT_EQ(encode(*tokenizer, ""), Ids{});
  EXPECT_EQ(encode(*tokenizer, "he<tool><|im_end|>he"), (Ids{he, 3, 2, he}));
  const Ids as_text = encode(*tokenizer, "<|im_end|>", {.parse_special = false});
  EXPECT_EQ(as_text.size(), 10u);
  EXPECT_EQ(tokenizer->decode(as_text), "<|im_end|>");
  EXPECT_EQ(tokenizer->decode(Ids{2, he, 3, 999999, -1}), "he<tool>");
  EXPECT_EQ(tokenizer->decode(Ids{2, he}, false), "<|im_end|>he");
  EXPECT_EQ(tokenizer->token_bytes(he + 1), " he");
  EXPECT_EQ(tokenizer->token_bytes(byte_id('\xC3')), "\xC3");
  EXPECT_EQ(tokenizer->token_bytes(-1), "");
  EXPECT_EQ(tokenizer->id_to_token(he + 1), "\xC4\xA0he");
  EXPECT_EQ(tokenizer->id_to_token(100000), std::nullopt);
  EXPECT_EQ(tokenizer->vocab_size(), 264);
  EXPECT_TRUE(tokenizer->is_special(2));
  EXPECT_FALSE(tokenizer->is_special(3));
  EXPECT_FALSE(tokenizer->is_special(-5));
}

TEST(Tokenizer, InvalidUtf8IsReadAsReplacements) {
  const auto tokenizer = load(byte_level_json());
  EXPECT_EQ(encode(*tokenizer, "a\xFF\xE4\xB8z"), encode(*tokenizer, "a\xEF\xBF\xBD\xEF\xBF\xBDz"));
  EXPECT_EQ(tokenizer->decode(Ids{byte_id('\xE4'), byte_id('\xB8'), byte_id('z')}), "\xEF\xBF\xBDz");
}

TEST(Tokenizer, SentencePiece) {
  const auto tokenizer = load(sentencepiece_json());
  const int32_t mark_a = *tokenizer->token_to_id(
      "\xE2\x96\x81"
      "a");
  const int32_t mark = *tokenizer->token_to_id("\xE2\x96\x81");
  const int32_t b = *tokenizer->token_to_id("b");
  const int32_t e_acute = *tokenizer->token_to_id("\xC3\xA9");
  EXPECT_EQ(encode(*tokenizer, "a b"), (Ids{1, mark_a, mark, b}));
  EXPECT_EQ(encode(*tokenizer, "\xC3\xA9\xC3\xA8", {.add_special_tokens = false}),
            (Ids{mark, e_acute, 3 + 0xC3, 3 + 0xA8}));
  EXPECT_EQ(encode(*tokenizer, ""), Ids{1});
  EXPECT_EQ(tokenizer->decode(encode(*tokenizer, " a  \xC3\xA8")), " a  \xC3\xA8");
  EXPECT_EQ(tokenizer->decode(Ids{3 + 0xC3, 3 + 0x28, b}),
            "\xEF\xBF\xBD\xEF\xBF\xBD"
            "b");
  EXPECT_EQ(tokenizer->fallback_byte(3 + 0x41), 0x41);
  EXPECT_EQ(tokenizer->fallback_byte(b), std::nullopt);
  EXPECT_EQ(tokenizer->token_bytes(mark_a), " a");
  EXPECT_EQ(tokenizer->token_bytes(3 + 0x0A), "\n");
  EXPECT_TRUE(tokenizer->adds_bos());
  EXPECT_EQ(tokenizer->unk_id(), 0);
}

TEST(Tokenizer, Unigram) {
  const auto json = [](const std::string& vocab, const std::string& fields, const std::string& pre = "null") {
    return R"({"added_tokens": [], "normalizer": {"type": "Prepend", "prepend": "_"}, "pre_tokenizer": )" + pre +
           R"(, "post_processor": null, "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]},
             "model": {"type": "Unigram", "vocab": [)" +
           vocab + "]" + fields + "}}";
  };
  const std::string vocab = R"(["<unk>", 0], ["a", -1.5], ["_a", -3.5], ["b", -2], ["<0x63>", 0.0], ["_", -2])";
  const std::string text = json(vocab, R"(, "unk_id": 0, "byte_fallback": true)");
  const auto tokenizer = Tokenizer::from_json({text, {}, {}}, "t");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.error().message;
  EXPECT_EQ(encode(**tokenizer, "abcd"), (Ids{2, 3, 0}));  // not each byte of "cd" has a token
  EXPECT_EQ(encode(**tokenizer, "cab"), (Ids{5, 4, 1, 3}));
  EXPECT_EQ((*tokenizer)->decode(Ids{2, 3, 4}), "_abc");
  EXPECT_EQ((*tokenizer)->unk_id(), 0);
  EXPECT_EQ(from_json_error({json(R"(["a", 0], ["b"])", ""), {}, {}}),
            "t: field 'model.vocab[1]' is not a token and its score");
  EXPECT_EQ(from_json_error({json(R"(["a", 0], ["a", 1])", ""), {}, {}}), "t: field 'model.vocab' has 'a' twice");
  EXPECT_EQ(from_json_error({json(R"(["a", 0])", R"(, "unk_id": 1)"), {}, {}}),
            "t: field 'model.unk_id' is 1; there are 1 tokens");
  EXPECT_EQ(from_json_error({json(R"(["a", 0])", "", R"({"type": "ByteLevel"})"), {}, {}}),
            "t: field 'model.type' is Unigram, which is not supported behind ByteLevel");
}

TEST(Tokenizer, RolesComeFromTheConfigs) {
  const auto alone = load(byte_level_json());
  EXPECT_EQ(alone->bos_id(), 0);
  EXPECT_EQ(alone->eos_id(), 1);
  EXPECT_EQ(Ids(alone->eog_ids().begin(), alone->eog_ids().end()), (Ids{1, 2}));

  const auto config = load(byte_level_json(), R"({"bos_token": null, "eos_token": {"content": "<|im_end|>"},
      "pad_token": "</s>", "unk_token": "nowhere", "add_bos_token": true})");
  EXPECT_EQ(config->eos_id(), 2);
  EXPECT_EQ(config->pad_id(), 1);
  EXPECT_EQ(config->unk_id(), std::nullopt);
  EXPECT_FALSE(config->adds_bos());  // not a class that heeds add_bos_token
  using Named = std::vector<std::pair<std::string, std::string>>;
  const auto named = config->named_tokens();
  EXPECT_EQ(Named(named.begin(), named.end()), (Named{{"pad_token", "</s>"}, {"unk_token", "nowhere"}}));
  EXPECT_TRUE(alone->named_tokens().empty());
  EXPECT_TRUE(alone->additional_special_tokens().empty());

  const auto own = load(byte_level_json(), R"({"eos_token": "</s>", "image_token": "<image>", "add_a_token": true,
      "model_type": "x", "cls_token": {"content": "[CLS]"}, "sep_token": null, "video_token": {"content": "<video>"},
      "extra_special_tokens": {"boi": "<boi>", "n": 5},
      "additional_special_tokens": ["<a>", {"content": "<b>"}, 5]})");
  const auto names = own->named_tokens();
  EXPECT_EQ(Named(names.begin(), names.end()),
            (Named{{"cls_token", "[CLS]"}, {"image_token", "<image>"}, {"video_token", "<video>"}, {"boi", "<boi>"}}));
  const auto list = own->additional_special_tokens();
  EXPECT_EQ(std::vector<std::string>(list.begin(), list.end()), (std::vector<std::string>{"<a>", "<b>"}));

  const auto generation = load(byte_level_json(), {}, R"({"eos_token_id": [3, 1]})");
  EXPECT_EQ(Ids(generation->eog_ids().begin(), generation->eog_ids().end()), (Ids{1, 3}));

  const auto llama = load(sentencepiece_json(),
                          R"({"tokenizer_class": "LlamaTokenizer", "add_bos_token": false, "add_eos_token": true,
                              "bos_token": "<s>", "eos_token": "</s>"})");
  EXPECT_FALSE(llama->adds_bos());
  EXPECT_EQ(encode(*llama, ""), Ids{2});
}

// As in transformers 4.57.6, which replaces the file's post-processor for some classes.
TEST(Tokenizer, SomeClassesSayWhatBeginsAndEndsAText) {
  TokenizerJson json = byte_level_json();
  json.post_processor = R"({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
      {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}], "special_tokens": {
      "<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}, "</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}}})";
  const auto of = [&](const std::string& name, const std::string& fields) {
    return encode(
        *load(json, R"({"tokenizer_class": ")" + name + R"(", "bos_token": "<s>", "eos_token": "</s>")" + fields + "}"),
        "");
  };
  for (const char* name : {"LlamaTokenizer", "GemmaTokenizerFast", "CohereTokenizerFast", "GPTNeoXTokenizerFast"}) {
    const bool begins = std::string_view(name) != "GPTNeoXTokenizerFast";
    EXPECT_EQ(of(name, ""), begins ? Ids{0} : Ids{}) << name;
    EXPECT_EQ(of(name, R"(, "add_bos_token": false)"), Ids{}) << name;
    EXPECT_EQ(of(name, R"(, "add_bos_token": true)"), Ids{0}) << name;
    EXPECT_EQ(of(name, R"(, "add_eos_token": true)"), (begins ? Ids{0, 1} : Ids{1})) << name;
  }
  EXPECT_EQ(of("PreTrainedTokenizerFast", R"(, "add_bos_token": false)"), (Ids{0, 1}));
}

TEST(Tokenizer, TheConfigSaysWhetherASpaceComesFirst) {
  for (const bool file : {true, false}) {
    TokenizerJson json = byte_level_json();
    json.pre_tokenizer = fmt::format(R"({{"type": "ByteLevel", "add_prefix_space": {}, "use_regex": true}})", file);
    const Ids with = {byte_id(' '), byte_id('a')}, without = {byte_id('a')};
    EXPECT_EQ(encode(*load(json), "a"), file ? with : without);
    EXPECT_EQ(encode(*load(json, "{}"), "a"), without);
    for (const char* none : {R"({"add_prefix_space": null})", R"({"tokenizer_class": "LlamaTokenizerFast"})"}) {
      const Ids ids = encode(*load(json, none), "a", {.add_special_tokens = false});
      EXPECT_EQ(ids, file ? with : without) << none;
    }
    EXPECT_EQ(encode(*load(json, R"({"add_prefix_space": true})"), "a"), with);
    json.pre_tokenizer = R"({"type": "Sequence", "pretokenizers": [)" + json.pre_tokenizer + "]}";
    EXPECT_EQ(encode(*load(json, R"({"add_prefix_space": true})"), "a"), file ? with : without);
  }
}

// Ids and flags are those that transformers 4.57.6 gives.
TEST(Tokenizer, TokensOfTheConfigAreAdded) {
  TokenizerJson json = byte_level_json();
  json.tokens.emplace_back("<x>");
  constexpr int32_t kX = 264;
  const auto with = [&](const std::string& added, const std::string& config) {
    TokenizerJson other = json;
    if (!added.empty()) other.added.insert(other.added.size() - 1, ", " + added);
    return load(other, config);
  };
  const auto encode_x = [](const Tokenizer& tokenizer) { return encode(tokenizer, "a <x> b"); };
  const int32_t a = byte_id('a'), b = byte_id('b'), space = byte_id(' ');
  ASSERT_EQ(encode_x(*with("", "")), (Ids{a, space, byte_id('<'), byte_id('x'), byte_id('>'), space, b}));

  // A token that the vocabulary has, and one that nothing has: it takes the next id.
  auto tokenizer = with("", R"({"added_tokens_decoder": {"300": {"content": "<y>"},
      "264": {"content": "<x>", "rstrip": true, "normalized": false, "special": true}}})");
  EXPECT_EQ(encode_x(*tokenizer), (Ids{a, space, kX, b}));
  EXPECT_TRUE(tokenizer->is_special(kX));
  EXPECT_EQ(encode(*tokenizer, "<y>"), Ids{265});
  EXPECT_FALSE(tokenizer->is_special(265));

  // The flags of one that is there, which stays special.
  const std::string there = R"({"id": 264, "content": "<x>", "lstrip": true, "normalized": false, "special": true})";
  EXPECT_EQ(encode_x(*with(there, "{}")), (Ids{a, kX, space, b}));
  tokenizer = with(there, R"({"added_tokens_decoder": {"264": {"content": "<x>", "special": false}}})");
  EXPECT_EQ(encode_x(*tokenizer), (Ids{a, space, kX, space, b}));
  EXPECT_TRUE(tokenizer->is_special(kX));

  // Tokens with a role are special, also where the vocabulary alone has them. What nothing has is no token.
  for (const std::string role :
       {R"("eos_token": "<x>")", R"("additional_special_tokens": ["<x>"])",
        R"("extra_special_tokens": {"image_token": "<x>"})", R"("extra_special_tokens": ["<x>"])"}) {
    for (const char* added : {"", R"({"id": 264, "content": "<x>"})"}) {
      tokenizer = with(added, "{" + role + R"(, "pad_token": "<pad>"})");
      EXPECT_EQ(encode_x(*tokenizer), (Ids{a, space, kX, space, b})) << role;
      EXPECT_TRUE(tokenizer->is_special(kX)) << role;
      EXPECT_EQ(tokenizer->vocab_size(), 265) << role;
    }
  }

  // Looked for as it is written by one file and in the normalized text by the other: both.
  json.normalizer = R"({"type": "Replace", "pattern": {"String": "X"}, "content": "x"})";
  json.tokens.back() = "<X>";
  for (const bool first : {true, false}) {
    tokenizer =
        with(fmt::format(R"({{"id": 264, "content": "<X>", "normalized": {}}})", first),
             fmt::format(R"({{"added_tokens_decoder": {{"264": {{"content": "<X>", "normalized": {}}}}}}})", !first));
    EXPECT_EQ(encode(*tokenizer, "<X><x>"), (Ids{kX, kX}));
  }

  const std::string text = json.text();
  EXPECT_EQ(from_json_error({text, R"({"added_tokens_decoder": {"x": {"content": "<y>"}}})", {}}),
            "t: tokenizer_config.json: field 'added_tokens_decoder.x': the name is not an id from 0 to 4194303");
  EXPECT_EQ(from_json_error({text, R"({"added_tokens_decoder": {"5": {}}})", {}}),
            "t: tokenizer_config.json: field 'added_tokens_decoder.5.content' is missing");
  EXPECT_EQ(from_json_error({text, R"({"added_tokens_decoder": []})", {}}),
            "t: tokenizer_config.json: field 'added_tokens_decoder' is not an object of ids and tokens");
}

TEST(Tokenizer, TheFirstLineOfMergesTxtIsNoMerge) {
  const std::string begin = "\"merges\": [";
  std::string text = byte_level_json().text();
  const auto plain = Tokenizer::from_json({text, {}, {}}, "t");
  text.insert(text.find(begin) + begin.size(), "\"#version: 0.2\", ");
  const auto tokenizer = Tokenizer::from_json({text, {}, {}}, "t");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.error().message;
  EXPECT_EQ(encode(**tokenizer, "hello he"), encode(**plain, "hello he"));
}

TEST(Tokenizer, TextsOfAnyLengthWorkFromManyThreads) {
  const auto tokenizer = load(byte_level_json());
  const auto other = load(sentencepiece_json());
  const std::string run(1 << 20, 'a');
  std::vector<std::thread> threads;
  std::vector<int> good(4, 0);
  for (size_t i = 0; i < good.size(); ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < 20; ++round) {
        const std::string text = "hello he " + std::to_string(round * 7 + static_cast<int>(i));
        good[i] += tokenizer->decode(encode(*tokenizer, text)) == text;
        good[i] += other->decode(encode(*other, text)) == text;
      }
      good[i] += encode(*tokenizer, run) == Ids(run.size(), byte_id('a'));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(good, std::vector<int>(4, 41));
}

struct BadCase {
  const char* expected;  // in the message
  void (*change)(TokenizerJson&);
};

TEST(Tokenizer, ErrorsNameTheFileAndTheField) {
  const BadCase cases[] = {
      {"'model.merges[4]': 'zz' is not in the vocabulary", [](TokenizerJson& j) { j.merges.emplace_back("zz", "a"); }},
      {"'model.merges[4]': 'ab' is not in the vocabulary", [](TokenizerJson& j) { j.merges.emplace_back("a", "b"); }},
      {"'model.vocab' has 'he' twice", [](TokenizerJson& j) { j.tokens.push_back("he"); }},
      {"'pre_tokenizer' is the pre-tokenizer 'Fancy'",
       [](TokenizerJson& j) { j.pre_tokenizer = R"({"type": "Fancy"})"; }},
      {"'pre_tokenizer.type' is missing", [](TokenizerJson& j) { j.pre_tokenizer = "{}"; }},
      {"'pre_tokenizer' is not an object", [](TokenizerJson& j) { j.pre_tokenizer = "[1]"; }},
      {"'normalizer.normalizers[0]' is the normalizer 'Lowercase'",
       [](TokenizerJson& j) { j.normalizer = R"({"type": "Sequence", "normalizers": [{"type": "Lowercase"}]})"; }},
      {"'pre_tokenizer.pattern.Regex': regular expression is refused",
       [](TokenizerJson& j) {
         j.pre_tokenizer = R"({"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": false})";
       }},
      {"'decoder' is the decoder 'WordPiece'", [](TokenizerJson& j) { j.decoder = R"({"type": "WordPiece"})"; }},
      {"'decoder' is missing", [](TokenizerJson& j) { j.decoder = "null"; }},
      {"'model.unk_token': 'nix'", [](TokenizerJson& j) { j.model_fields = R"("unk_token": "nix")"; }},
      {"'model.dropout'", [](TokenizerJson& j) { j.model_fields = R"("dropout": 0.1)"; }},
      {"'model.end_of_word_suffix'", [](TokenizerJson& j) { j.model_fields = R"("end_of_word_suffix": "</w>")"; }},
      {"'model.byte_fallback' is not true or false",
       [](TokenizerJson& j) { j.model_fields = R"("byte_fallback": 1)"; }},
      {"'added_tokens[0].id' is -1", [](TokenizerJson& j) { j.added = R"([{"id": -1, "content": "x"}])"; }},
      {"'added_tokens[0].id' is 99999999", [](TokenizerJson& j) { j.added = R"([{"id": 99999999, "content": "x"}])"; }},
      {"id 5 is 'xx' here", [](TokenizerJson& j) { j.added = R"([{"id": 5, "content": "xx"}])"; }},
      {"'he' has id 900 here", [](TokenizerJson& j) { j.added = R"([{"id": 900, "content": "he"}])"; }},
      {"adds id 700, which no token has",
       [](TokenizerJson& j) {
         j.post_processor = R"({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "q"}},
             {"Sequence": {"id": "A"}}], "special_tokens": {"q": {"ids": [700]}}})";
       }},
      {"'model.vocab': the token with id 264 has 4097 bytes; at most 4096 are supported",
       [](TokenizerJson& j) { j.tokens.push_back(std::string(4097, 'a')); }},
      {"'added_tokens[0].content' has 4097 bytes; at most 4096 are supported",
       [](TokenizerJson& j) { j.added = R"([{"id": 900, "content": ")" + std::string(4097, 'a') + "\"}]"; }},
      {"nested too deeply",
       [](TokenizerJson& j) {
         std::string deep = R"({"type": "NFC"})";
         for (int i = 0; i < 100; ++i) deep = fmt::format(R"({{"type": "Sequence", "normalizers": [{}]}})", deep);
         j.normalizer = deep;
       }},
  };
  for (const BadCase& bad : cases) {
    TokenizerJson json = byte_level_json();
    bad.change(json);
    const std::string text = json.text();
    const auto tokenizer = Tokenizer::from_json({text, {}, {}}, "dir/tokenizer.json");
    ASSERT_FALSE(tokenizer.ok()) << bad.expected;
    const std::string& message = tokenizer.error().message;
    EXPECT_NE(message.find(bad.expected), std::string::npos) << message;
    EXPECT_TRUE(message.starts_with("dir/tokenizer.json: ")) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  }
}

// `count` of `step`, in sequences of 10 in one sequence.
std::string nested_sequences(const std::string& children, const std::string& step, size_t count) {
  const std::string begin = R"({"type": "Sequence", ")" + children + R"(": [)";
  std::string all = begin;
  for (size_t i = 0; i < count; ++i) {
    if (i % 10 == 0) all += (i == 0 ? "" : "]}, ") + begin;
    all += (i % 10 == 0 ? "" : ", ") + step;
  }
  return all + "]}]}";
}

TEST(Tokenizer, StepsOfNestedSequencesAreCountedTogether) {
  struct Pipeline {
    std::string TokenizerJson::*field;
    const char* children;
    const char* step;
    const char* path;  // of the step after the last that is allowed
  };
  const Pipeline pipelines[] = {
      {&TokenizerJson::normalizer, "normalizers", R"({"type": "NFC"})", "normalizer.normalizers[6].normalizers[4]"},
      {&TokenizerJson::pre_tokenizer, "pretokenizers",
       R"({"type": "Metaspace", "replacement": "_", "prepend_scheme": "never", "split": false})",
       "pre_tokenizer.pretokenizers[6].pretokenizers[4]"},
      {&TokenizerJson::decoder, "decoders", R"({"type": "Replace", "pattern": {"String": "_"}, "content": " "})",
       "decoder.decoders[6].decoders[4]"},
  };
  for (const Pipeline& pipeline : pipelines) {
    TokenizerJson json = sentencepiece_json();
    json.*pipeline.field = nested_sequences(pipeline.children, pipeline.step, 64);
    const auto tokenizer = load(json);
    ASSERT_NE(tokenizer, nullptr);
    EXPECT_FALSE(encode(*tokenizer, "a b").empty());

    json.*pipeline.field = nested_sequences(pipeline.children, pipeline.step, 65);
    const std::string text = json.text();
    const auto refused = Tokenizer::from_json({text, {}, {}}, "t");
    ASSERT_FALSE(refused.ok()) << pipeline.path;
    EXPECT_EQ(refused.error().message,
              std::string("t: field '") + pipeline.path +
                  "' is a step beyond the 64 that a pipeline may have, which is not supported");
  }
}

TEST(Tokenizer, TokensOfTheGreatestLength) {
  const std::string mark = "\xE2\x96\x81";
  std::string marks;
  for (int i = 0; i < 1365; ++i) marks += mark;  // 4095 bytes
  TokenizerJson json = sentencepiece_json();
  json.tokens.push_back(marks);
  json.tokens.push_back(mark + "a" + mark + mark + "b");
  const std::string run(4096, 'b');
  json.added = R"([{"id": 900, "content": ")" + run + R"(", "special": true}])";
  const auto tokenizer = load(json);
  ASSERT_NE(tokenizer, nullptr);
  EXPECT_EQ(tokenizer->token_bytes(*tokenizer->token_to_id(marks)), std::string(1365, ' '));
  EXPECT_EQ(tokenizer->token_bytes(*tokenizer->token_to_id(mark + "a" + mark + mark + "b")), " a  b");
  EXPECT_EQ(encode(*tokenizer, run, {.add_special_tokens = false}), Ids{900});
}

// As one after the other, and no match begins in what an earlier one left.
TEST(Tokenizer, DecoderReplacesInOrder) {
  TokenizerJson json = sentencepiece_json();
  json.tokens.insert(json.tokens.end(), {"aaab", "xaabaa"});
  json.decoder = R"({"type": "Sequence", "decoders": [
      {"type": "Replace", "pattern": {"String": "aa"}, "content": "a"},
      {"type": "Replace", "pattern": {"String": "ab"}, "content": ""}]})";
  const auto tokenizer = load(json);
  ASSERT_NE(tokenizer, nullptr);
  EXPECT_EQ(tokenizer->token_bytes(*tokenizer->token_to_id("aaab")), "a");
  EXPECT_EQ(tokenizer->token_bytes(*tokenizer->token_to_id("xaabaa")), "xa");
}

// llm-jp's: bytes first, then the marks, and one space off the beginning of the text alone.
TEST(Tokenizer, DecoderMayHaveItsTextsAsRegularExpressions) {
  TokenizerJson json = sentencepiece_json();
  const auto decoder = [](std::string_view mark, std::string_view first) {
    return fmt::format(R"({{"type": "Sequence", "decoders": [{{"type": "ByteFallback"}},
        {{"type": "Replace", "pattern": {{"Regex": "{}"}}, "content": " "}}, {{"type": "Fuse"}},
        {{"type": "Replace", "pattern": {{"Regex": "{}"}}, "content": ""}}]}})",
                       mark, first);
  };
  constexpr const char* kFirst = R"((?<!\\n)^ )";
  json.decoder = decoder(R"(\u2581)", kFirst);
  const auto tokenizer = load(json);
  ASSERT_NE(tokenizer, nullptr);
  const int32_t a = *tokenizer->token_to_id(
                    "\xE2\x96\x81"
                    "a"),
                line_end = *tokenizer->token_to_id("<0x0A>");
  EXPECT_EQ(tokenizer->decode(std::vector<int32_t>{a, line_end, a, a}), "a\n a a");
  for (const auto& [mark, first, expected] :
       {std::tuple{"\\u2581+", kFirst, "'decoder.decoders[1]' is a Replace of a regular expression"},
        {"0", kFirst, "'decoder.decoders[1]' is a Replace of ASCII after ByteFallback"},
        {"\\u2581", "^ ", "'decoder.decoders[3]' is a Replace after Fuse other than of one leading space"}}) {
    json.decoder = decoder(mark, first);
    EXPECT_NE(from_json_error({json.text(), {}, {}}).find(expected), std::string::npos) << expected;
  }
}

// The Metaspace decoder takes the marks off the first token, not the spaces that are its own.
TEST(Tokenizer, MetaspaceDecoderDropsMarksOfTheFirstToken) {
  TokenizerJson json = sentencepiece_json();
  json.tokens.push_back("\xE2\x96\x81x y");
  json.decoder = R"({"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": true})";
  const auto tokenizer = load(json);
  ASSERT_NE(tokenizer, nullptr);
  const std::vector<int32_t> twice(2, *tokenizer->token_to_id("\xE2\x96\x81x y"));
  EXPECT_EQ(tokenizer->decode(twice), "x y x y");
  StreamingDetokenizer stream(tokenizer, {.continues = false});
  std::string streamed = stream.append(twice[0]);
  streamed += stream.append(twice[1]);
  EXPECT_EQ(streamed + stream.finish(), "x y x y");
}

TEST(Tokenizer, RefusesEveryTruncation) {
  const std::string text = byte_level_json().text();
  for (size_t size = 0; size + 1 < text.size(); ++size) {
    const auto tokenizer = Tokenizer::from_json({std::string_view(text).substr(0, size), {}, {}}, "cut");
    ASSERT_FALSE(tokenizer.ok()) << size;
  }
}

TEST(Tokenizer, RefusesOtherFilesThatAreWrong) {
  const std::string text = byte_level_json().text();
  const auto message = [&](const TokenizerFiles& files) {
    const auto tokenizer = Tokenizer::from_json(files, "t");
    return tokenizer.ok() ? std::string("ok") : tokenizer.error().message;
  };
  EXPECT_EQ(message({text, "{", {}}).find("t: tokenizer_config.json: the file is not JSON"), 0u);
  EXPECT_EQ(message({text, R"({"bos_token": 3})", {}}),
            "t: tokenizer_config.json: field 'bos_token' is neither a token nor an object with its 'content'");
  EXPECT_EQ(message({text, {}, R"({"eos_token_id": "x"})"}),
            "t: generation_config.json: field 'eos_token_id' is not a token id or a list of them");
  EXPECT_EQ(message({"[]", {}, {}}), "t: the tokenizer is not a JSON object");
  EXPECT_NE(message({"\xFF\xFE{}", {}, {}}).find("not JSON"), std::string::npos);
}

TEST(Tokenizer, HostilePatternsEndInAnError) {
  TokenizerJson json = byte_level_json();
  json.pre_tokenizer = R"({"type": "Sequence", "pretokenizers": [
      {"type": "Split", "pattern": {"Regex": "(a+)+b|(a|a)+c"}, "behavior": "Isolated", "invert": false},
      {"type": "ByteLevel", "add_prefix_space": false}]})";
  const auto tokenizer = load(json);
  const auto ids = tokenizer->encode(std::string(300, 'a'));
  ASSERT_FALSE(ids.ok());
  EXPECT_EQ(ids.error().code, ErrorCode::kResource);
  EXPECT_TRUE(tokenizer->encode("aab").ok());
}

// GGUF

struct Gguf {
  std::vector<std::string> texts;
  std::vector<std::string_view> tokens;
  std::vector<int32_t> types;
  std::vector<float> scores;
  std::vector<std::string> merge_texts;
  std::vector<std::string_view> merges;
  GgufVocab vocab;

  Gguf(const TokenizerJson& json, std::string_view model, std::string_view pre) : texts(json.tokens) {
    tokens.assign(texts.begin(), texts.end());
    types.assign(texts.size(), 1);
    merge_texts.reserve(json.merges.size());
    for (const auto& [left, right] : json.merges) merge_texts.push_back(fmt::format("{} {}", left, right));
    merges.assign(merge_texts.begin(), merge_texts.end());
    vocab.model = model;
    vocab.pre = pre;
    refresh();
  }
  void refresh() {
    vocab.tokens = tokens;
    vocab.types = types;
    vocab.scores = scores;
    vocab.merges = merges;
  }
  std::string message() const {
    const auto tokenizer = Tokenizer::from_gguf(vocab, "m.gguf");
    return tokenizer.ok() ? "ok" : tokenizer.error().message;
  }
};

TEST(TokenizerGguf, ByteLevelEqualsTheJsonFile) {
  Gguf gguf(byte_level_json(), "gpt2", "gpt-2");
  gguf.types[0] = gguf.types[1] = gguf.types[2] = 3;
  gguf.types[3] = 4;
  gguf.vocab.bos = 0;
  gguf.vocab.eos = 1;
  gguf.vocab.eot = 2;
  const auto tokenizer = Tokenizer::from_gguf(gguf.vocab, "m.gguf");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.error().message;
  const auto json = load(byte_level_json());
  for (const char* text : {"hello he's 1234\n\n", "he<tool><|im_end|>he", "\xF0\x9F\x99\x82 he"}) {
    EXPECT_EQ(encode(**tokenizer, text), encode(*json, text)) << text;
    EXPECT_EQ((*tokenizer)->decode(encode(**tokenizer, text)), json->decode(encode(*json, text)));
  }
  EXPECT_EQ(Ids((*tokenizer)->eog_ids().begin(), (*tokenizer)->eog_ids().end()), (Ids{1, 2}));
  EXPECT_FALSE((*tokenizer)->adds_bos());
  gguf.vocab.add_bos = true;
  gguf.vocab.add_eos = true;
  const auto with_both = Tokenizer::from_gguf(gguf.vocab, "m.gguf");
  ASSERT_TRUE(with_both.ok());
  EXPECT_EQ(encode(**with_both, ""), (Ids{0, 1}));
  gguf.vocab.pre = "llama-bpe";
  gguf.vocab.add_bos = std::nullopt;
  gguf.vocab.add_eos = std::nullopt;
  const auto llama = Tokenizer::from_gguf(gguf.vocab, "m.gguf");
  ASSERT_TRUE(llama.ok());
  EXPECT_TRUE((*llama)->adds_bos());
}

// The ids that end a generation; an error is a test's failure.
Ids ends_of(const Gguf& gguf) {
  const auto tokenizer = Tokenizer::from_gguf(gguf.vocab, "m.gguf");
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.error().message;
  return tokenizer.ok() ? Ids((*tokenizer)->eog_ids().begin(), (*tokenizer)->eog_ids().end()) : Ids{};
}

// GLM 4 ends a tool call with it, which its GGUF files do not say.
TEST(TokenizerGguf, AnObservationEndsATurn) {
  TokenizerJson json = byte_level_json();
  json.tokens[2] = "<|observation|>";
  Gguf gguf(json, "gpt2", "glm4");
  gguf.types[0] = gguf.types[1] = gguf.types[2] = 3;
  gguf.vocab.eos = 1;
  EXPECT_EQ(ends_of(gguf), (Ids{1, 2}));
}

// As llama.cpp takes files of before it wrote the name.
TEST(TokenizerGguf, TheEndOfAMessageEndsATurn) {
  TokenizerJson json = byte_level_json();
  json.tokens[0] = "<|turn|>";
  json.tokens[2] = "<|message|>";
  Gguf gguf(json, "gpt2", "gpt-2");
  gguf.types[0] = gguf.types[1] = gguf.types[2] = 3;
  gguf.vocab.eos = 1;
  gguf.vocab.eot = 0;
  gguf.vocab.eom = 2;
  EXPECT_EQ(ends_of(gguf), (Ids{0, 1, 2}));
}

// Qwen2.5-Coder's files name none of them.
TEST(TokenizerGguf, WhatFollowsAMiddleThatIsFilledInEndsIt) {
  TokenizerJson json = byte_level_json();
  json.tokens[0] = "<|fim_pad|>";
  json.tokens[2] = "<|file_sep|>";
  json.tokens[3] = "<|fim_middle|>";
  Gguf gguf(json, "gpt2", "qwen2");
  gguf.types[0] = gguf.types[2] = gguf.types[3] = 4;
  gguf.types[1] = 3;
  gguf.vocab.eos = 1;
  EXPECT_EQ(ends_of(gguf), (Ids{0, 1, 2}));
}

TEST(TokenizerGguf, TheEndOfATextEndsAnAnswerThatHasATurnsEnd) {
  for (const char* end : {"</s>", "<eos>", "<end_of_utterance>"}) {
    TokenizerJson json = byte_level_json();
    json.tokens[1] = end;
    json.tokens[2] = "<|turn|>";
    Gguf gguf(json, "gpt2", "gpt-2");
    gguf.types[0] = gguf.types[1] = gguf.types[2] = 3;
    gguf.vocab.eos = 2;
    EXPECT_EQ(ends_of(gguf), (Ids{1, 2})) << end;
  }
}

TEST(TokenizerGguf, NoPreTokenizerIsTheDefaultOne) {
  const std::string space = "\xC4\xA0";  // as byte-level vocabularies write it
  TokenizerJson json = byte_level_json();
  for (const auto& [left, right] : std::vector<std::pair<std::string, std::string>>{
           {"1", "1"}, {"11", "11"}, {"11", "1"}, {space, "11"}, {"=", "="}, {space, "="}, {"'", "s"}}) {
    json.tokens.push_back(left + right);
    json.merges.emplace_back(left, right);
  }
  Gguf gguf(json, "gpt2", "");
  const auto pieces = [&](std::string_view text) {
    const auto tokenizer = Tokenizer::from_gguf(gguf.vocab, "m.gguf");
    EXPECT_TRUE(tokenizer.ok()) << tokenizer.error().message;
    std::vector<std::string> found;
    for (const int32_t id : encode(**tokenizer, text)) found.emplace_back((*tokenizer)->token_bytes(id));
    return found;
  };
  for (const char* name : {"", "default"}) {
    gguf.vocab.pre = name;
    EXPECT_EQ(pieces("he 1111 =="), (std::vector<std::string>{"he", " ", "111", "1", " ", "=="}));
    EXPECT_EQ(pieces("he's"), (std::vector<std::string>{"he", "'", "s"}));
  }
  gguf.vocab.pre = "gpt-2";
  EXPECT_EQ(pieces("he 11 ="), (std::vector<std::string>{"he", " 11", " ="}));
  EXPECT_EQ(pieces("he's1111"), (std::vector<std::string>{"he", "'s", "1111"}));
}

// As in Qwen2's files, whose matrices have more rows than the vocabulary has tokens.
TEST(TokenizerGguf, UnusedTokensOfAByteLevelVocabularyAreNone) {
  Gguf gguf(byte_level_json(), "gpt2", "qwen2");
  const Ids ids = {static_cast<int32_t>(gguf.tokens.size()), static_cast<int32_t>(gguf.tokens.size()) + 1};
  gguf.tokens.insert(gguf.tokens.end(), {"[PAD7]", "[PAD8]"});
  gguf.types.insert(gguf.types.end(), {5, 1});
  gguf.refresh();
  const auto tokenizer = Tokenizer::from_gguf(gguf.vocab, "m.gguf");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.error().message;
  EXPECT_EQ((*tokenizer)->decode(ids), "[PAD8]");
}

TEST(TokenizerGguf, SentencePieceEqualsTheJsonFile) {
  Gguf gguf(sentencepiece_json(), "llama", "default");
  gguf.types[0] = 2;
  gguf.types[1] = gguf.types[2] = 3;
  gguf.scores.assign(gguf.texts.size(), 0);
  gguf.refresh();
  gguf.vocab.bos = 1;
  gguf.vocab.eos = 2;
  gguf.vocab.unknown = 0;
  const auto tokenizer = Tokenizer::from_gguf(gguf.vocab, "m.gguf");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.error().message;
  const auto json = load(sentencepiece_json());
  for (const char* text : {"a b", " a  \xC3\xA9\xC3\xA8</s>a", ""}) {
    EXPECT_EQ(encode(**tokenizer, text), encode(*json, text)) << text;
    EXPECT_EQ((*tokenizer)->decode(encode(**tokenizer, text)), json->decode(encode(*json, text)));
  }
}

TEST(TokenizerGguf, PhiThreesTokensTakeTheSpaceBehindThemAlong) {
  TokenizerJson json = sentencepiece_json();
  json.tokens.insert(json.tokens.end(), {"<|user|>", "<|endoftext|>"});
  Gguf gguf(json, "llama", "default");
  gguf.types[0] = 2;
  gguf.types[1] = gguf.types[2] = 3;
  gguf.types.end()[-1] = gguf.types.end()[-2] = 3;
  gguf.scores.assign(gguf.texts.size(), 0);
  gguf.refresh();
  const auto ids = [&](std::string_view architecture, const char* text) {
    gguf.vocab.architecture = architecture;
    const auto tokenizer = Tokenizer::from_gguf(gguf.vocab, "m.gguf");
    EXPECT_TRUE(tokenizer.ok()) << tokenizer.error().message;
    return tokenizer.ok() ? encode(**tokenizer, text) : Ids();
  };
  EXPECT_EQ(ids("phi3", "<|user|>\n a</s> \nb"), ids("llama", "<|user|>a</s>b"));
  EXPECT_NE(ids("llama", "<|user|>\n a</s> \nb"), ids("llama", "<|user|>a</s>b"));
  for (const char* kept : {"<s> a", "<|endoftext|>\na", "<unk> a"}) EXPECT_EQ(ids("phi3", kept), ids("llama", kept));
}

TEST(TokenizerGguf, ErrorsNameTheKey) {
  EXPECT_NE(
      Gguf(byte_level_json(), "gpt2", "weird").message().find("m.gguf: key 'tokenizer.ggml.pre' is 'weird'; known"),
      std::string::npos);
  EXPECT_NE(Gguf(byte_level_json(), "bert", "").message().find("'tokenizer.ggml.model' is 'bert'"), std::string::npos);
  EXPECT_NE(Gguf(sentencepiece_json(), "llama", "").message().find("'tokenizer.ggml.scores'"), std::string::npos);
  Gguf gguf(byte_level_json(), "gpt2", "smollm");
  EXPECT_EQ(gguf.message(), "ok");
  gguf.vocab.padding = 1;
  const auto padded = Tokenizer::from_gguf(gguf.vocab, "m.gguf");
  ASSERT_TRUE(padded.ok()) << padded.error().message;
  ASSERT_EQ((*padded)->named_tokens().size(), 1u);
  EXPECT_EQ((*padded)->named_tokens()[0].first, "pad_token");
  EXPECT_EQ((*padded)->named_tokens()[0].second, gguf.texts[1]);
  gguf.vocab.bos = 1000;
  EXPECT_NE(gguf.message().find("'tokenizer.ggml.bos_token_id' is 1000"), std::string::npos);
  gguf.vocab.bos = std::nullopt;
  gguf.merges.push_back("a");
  gguf.refresh();
  EXPECT_NE(gguf.message().find("'tokenizer.ggml.merges[4]' is not a pair"), std::string::npos);
  gguf.merges.back() = "he qq";
  EXPECT_NE(gguf.message().find("'tokenizer.ggml.merges[4]': 'qq' is not"), std::string::npos);
  gguf.merges.clear();
  gguf.refresh();
  EXPECT_NE(gguf.message().find("'tokenizer.ggml.merges' is missing"), std::string::npos);
  gguf.types.pop_back();
  gguf.refresh();
  EXPECT_NE(gguf.message().find("'tokenizer.ggml.token_type' has 263 entries for 264"), std::string::npos);
  gguf.types.clear();
  const std::string too_long(4097, 'a');
  gguf.tokens[7] = too_long;
  gguf.refresh();
  EXPECT_NE(gguf.message().find("'tokenizer.ggml.tokens[7]' has 4097 bytes; at most 4096 are supported"),
            std::string::npos);
  gguf.tokens[7] = "\xFF";
  gguf.refresh();
  EXPECT_NE(gguf.message().find("'tokenizer.ggml.tokens[7]' is not UTF-8"), std::string::npos);
  gguf.tokens[7] = gguf.tokens[8];
  EXPECT_NE(gguf.message().find("is also token 7"), std::string::npos);
  EXPECT_NE(Tokenizer::from_gguf({}, "m.gguf").error().message.find("'tokenizer.ggml.tokens' is missing"),
            std::string::npos);
}

}  // namespace
}  // namespace nfp
