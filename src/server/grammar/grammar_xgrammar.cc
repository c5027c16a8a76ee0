#include "server/grammar/grammar.h"

#include <xgrammar/xgrammar.h>

#include <mutex>

namespace nfp::server {
namespace {

constexpr int64_t kCacheBytes = 256 << 20;

class XgrammarConstraint final : public TokenConstraint {
 public:
  XgrammarConstraint(const xgrammar::CompiledGrammar& grammar, int32_t vocab) : matcher_(grammar), vocab_(vocab) {}

  bool fill(std::span<uint32_t> mask) override {
    const int32_t words = xgrammar::GetBitmaskSize(vocab_);
    if (matcher_.IsTerminated() || mask.size() < static_cast<size_t>(words)) return false;
    int64_t shape = words;
    DLTensor tensor{};
    tensor.data = mask.data();
    tensor.device = {kDLCPU, 0};
    tensor.ndim = 1;
    tensor.dtype = xgrammar::GetBitmaskDLType();
    tensor.shape = &shape;
    try {
      return matcher_.FillNextTokenBitmask(&tensor);
    } catch (const std::exception&) {
      return false;  // then accept() refuses what does not fit
    }
  }

  bool accept(int32_t token) override {
    try {
      return matcher_.IsTerminated() || matcher_.AcceptToken(token);
    } catch (const std::exception&) {
      return false;
    }
  }

 private:
  xgrammar::GrammarMatcher matcher_;
  int32_t vocab_;
};

class XgrammarCompiled final : public CompiledConstraint {
 public:
  XgrammarCompiled(xgrammar::CompiledGrammar grammar, int32_t vocab) : grammar_(std::move(grammar)), vocab_(vocab) {}
  std::unique_ptr<TokenConstraint> instantiate() const override {
    return std::make_unique<XgrammarConstraint>(grammar_, vocab_);
  }

 private:
  xgrammar::CompiledGrammar grammar_;
  int32_t vocab_;
};

// EBNF of one string literal.
std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<uint8_t>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20 || byte == 0x7F) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  return out + "\"";
}

class XgrammarCompiler final : public GrammarCompiler {
 public:
  XgrammarCompiler(std::shared_ptr<const Tokenizer> tokenizer, int32_t vocab, std::span<const int32_t> end_ids)
      : tokenizer_(std::move(tokenizer)), vocab_(vocab), end_ids_(end_ids.begin(), end_ids.end()) {}

  Result<std::shared_ptr<const CompiledConstraint>> compile(const GrammarSpec& spec) override {
    try {
      xgrammar::GrammarCompiler& compiler = ready();
      switch (spec.kind) {
        case GrammarSpec::Kind::kJsonObject:
          // OpenAI's json_object is any JSON object, not any JSON value.
          return wrap(compiler.CompileJSONSchema(R"({"type":"object"})", true, std::nullopt, std::nullopt,
                                                 /*strict_mode=*/false));
        case GrammarSpec::Kind::kJsonSchema:
          return wrap(compiler.CompileJSONSchema(spec.text));
        case GrammarSpec::Kind::kRegex:
          return wrap(compiler.CompileRegex(spec.text));
        case GrammarSpec::Kind::kEbnf:
          return wrap(compiler.CompileGrammar(spec.text));
        case GrammarSpec::Kind::kChoice: {
          std::string ebnf = "root ::= ";
          for (size_t i = 0; i < spec.choices.size(); ++i) ebnf += (i > 0 ? " | " : "") + quoted(spec.choices[i]);
          return wrap(compiler.CompileGrammar(ebnf));
        }
        case GrammarSpec::Kind::kNone:
          break;
      }
      return error(ErrorCode::kInvalidInput, "no grammar is given");
    } catch (const std::exception& failure) {
      // xgrammar writes "[12:34:56] /path/file.cc:123: message".
      std::string_view what = failure.what();
      if (const size_t place = what.find(".cc:"); place != std::string_view::npos) {
        if (const size_t text = what.find(": ", place); text != std::string_view::npos) what.remove_prefix(text + 2);
      }
      while (!what.empty() && (what.back() == '\n' || what.back() == ' ')) what.remove_suffix(1);
      return error(ErrorCode::kInvalidInput, "'{}' cannot be compiled: {}", spec.param, what.substr(0, 300));
    }
  }

 private:
  std::shared_ptr<const CompiledConstraint> wrap(xgrammar::CompiledGrammar grammar) const {
    return std::make_shared<XgrammarCompiled>(std::move(grammar), vocab_);
  }

  // Indexing the vocabulary takes a moment, so it waits for the first grammar.
  xgrammar::GrammarCompiler& ready() {
    const std::lock_guard lock(mutex_);
    if (!compiler_) {
      std::vector<std::string> vocab(static_cast<size_t>(vocab_));
      for (int32_t id = 0; id < std::min(vocab_, tokenizer_->vocab_size()); ++id) {
        // Special tokens stay empty: no grammar's text contains them.
        if (!tokenizer_->is_special(id)) vocab[static_cast<size_t>(id)] = std::string(tokenizer_->token_bytes(id));
      }
      const xgrammar::TokenizerInfo info(vocab, xgrammar::VocabType::RAW, vocab_, end_ids_);
      compiler_.emplace(info, /*max_threads=*/1, /*cache_enabled=*/true, kCacheBytes);
    }
    return *compiler_;
  }

  std::shared_ptr<const Tokenizer> tokenizer_;
  int32_t vocab_;
  std::vector<int> end_ids_;
  std::mutex mutex_;
  std::optional<xgrammar::GrammarCompiler> compiler_;
};

}  // namespace

bool grammars_available() { return true; }

std::unique_ptr<GrammarCompiler> make_grammar_compiler(std::shared_ptr<const Tokenizer> tokenizer, int32_t vocab,
                                                       std::span<const int32_t> end_ids) {
  return std::make_unique<XgrammarCompiler>(std::move(tokenizer), vocab, end_ids);
}

}  // namespace nfp::server
