"""Tokenizers of the kinds that we support, as tokenizer.json files: the real one of SmolLM2 (from the demo model's GGUF
file, where it is there) and small ones trained here with the pipelines of well-known models."""

import json
import os
import pathlib
import re
import struct

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CL100K_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CL100K_HEAD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
LLAMA3 = CL100K_HEAD + r"\p{N}{1,3}" + CL100K_TAIL
QWEN2 = CL100K_HEAD + r"\p{N}" + CL100K_TAIL
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The letters of DeepSeek LLM's tokenizer.json.
CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + CONTRACTION +
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + CONTRACTION +
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MARK = "\u2581"


def shared_data():
    default = pathlib.Path(__file__).resolve().parents[2].parent / "shared" / "data"
    return pathlib.Path(os.environ.get("NFP_SHARED_DATA", default))


def wikitext():
    path = shared_data() / "wikitext2-test.txt"
    return path.read_bytes().decode() if path.exists() else None  # with its line ends as they are


def training_text():
    text = wikitext()
    if text is None:  # small, but enough merges for the pipelines to show
        text = "\n".join(p.read_text(encoding="utf-8") for p in sorted(pathlib.Path(__file__).parent.glob("*.py")))
        text = re.sub(r"<[^<>\s]*>", " ", text)  # names of special and byte tokens are no words
    # A part of it has words enough. Letters and signs beyond English, so that some of them get tokens of their own.
    return text.splitlines()[::4] + ["naïve café Ωμέγα русский текст 中文字符 日本語 한국어 🙂🙃 – “quoted” ½ ² ﬁ é"] * 40


def byte_level(pre_tokenizer, size=3000, special=(), normalizer=None, ignore_merges=False, missing_bytes=False):
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = [] if missing_bytes else pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, special_tokens=list(special),
                                  show_progress=False)
    tokenizer.train_from_iterator(training_text(), trainer)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def bos_template(token, tokenizer):
    return processors.TemplateProcessing(single=f"{token} $A", pair=f"{token} $A {token} $B",
                                         special_tokens=[(token, tokenizer.token_to_id(token))])


def gpt2():
    return byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), special=["<|endoftext|>"])


def gpt2_prefix():
    tokenizer = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True), special=["<s>", "</s>", "<mask>"],
                           missing_bytes=True)
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0))
    return tokenizer


def llama3():
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    pre = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
    tokenizer = byte_level(pre, special=special, ignore_merges=True)
    tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), bos_template("<|begin_of_text|>", tokenizer)])
    return tokenizer


def llama3_odd_merges():
    """Tokens that the merges do not lead to, which ignore_merges finds nevertheless."""
    spec = json.loads(llama3().to_str())
    del spec["model"]["merges"][100:1500:7]
    kept, reachable = [], set()
    made = {a + b for a, b in spec["model"]["merges"]}
    for a, b in spec["model"]["merges"]:
        if all(len(t) == 1 or t in made for t in (a, b)):
            kept.append([a, b])
            reachable.add(a + b)
    spec["model"]["merges"] = kept
    return Tokenizer.from_str(json.dumps(spec))


def qwen2():
    split = pre_tokenizers.Split(Regex(QWEN2), "isolated", invert=False)
    pre = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = byte_level(pre, special=special, normalizer=normalizers.NFC())
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("</tool_call>", normalized=False)])
    return tokenizer


def tekken():
    split = pre_tokenizers.Split(Regex(TEKKEN), "isolated")
    pre = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer = byte_level(pre, special=["<unk>", "<s>", "</s>", "[INST]", "[/INST]"], ignore_merges=True)
    tokenizer.post_processor = bos_template("<s>", tokenizer)
    return tokenizer


def cl100k():
    """Phi-4's and OLMo 2's: Llama 3's pieces, as what is left where all else is removed, and merges alone."""
    split = pre_tokenizers.Split(Regex(LLAMA3), "removed", invert=True)
    pre = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return byte_level(pre, special=["<|endoftext|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>"])


def glm4():
    """Llama 3's pieces, and whole ones before merges."""
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    pre = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    spec = json.loads(byte_level(pre, special=["<|endoftext|>", "[gMASK]", "<sop>"], ignore_merges=True).to_str())
    spec["model"]["merges"] = [merge for i, merge in enumerate(spec["model"]["merges"]) if i % 7 or i < 500]
    made = {a + b for a, b in spec["model"]["merges"]}
    spec["model"]["merges"] = [m for m in spec["model"]["merges"] if all(len(t) == 1 or t in made for t in m)]
    return Tokenizer.from_str(json.dumps(spec))


def minicpm5():
    numbers = pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated")
    split = pre_tokenizers.Split(Regex(CL100K_HEAD + r"\p{N}+" + CL100K_TAIL), "isolated")
    pre = pre_tokenizers.Sequence([numbers, split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return byte_level(pre, special=["<s>", "</s>", "<|im_end|>"], ignore_merges=True)


def viking():
    words = pre_tokenizers.Split(Regex(" ?[^(\\s|[.,!?…。，、।۔،])]+"), "isolated")
    pre = pre_tokenizers.Sequence([words, pre_tokenizers.Digits(individual_digits=True),
                                   pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return byte_level(pre, special=["<unk>", "<s>", "</s>"])


def seed():
    """Seed-OSS's: Qwen's, but that signs do not take the line ends behind them along; and no NFC."""
    tail = r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = pre_tokenizers.Split(Regex(CL100K_HEAD + r"\p{N}{1}" + tail), "isolated", invert=False)
    pre = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return byte_level(pre, special=["<seed:bos>", "<seed:pad>", "<seed:eos>", "<seed:think>"])


def deepseek(*patterns):
    pre = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in ("[\r\n]", *patterns, HAN)]
    pre += [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    return byte_level(pre_tokenizers.Sequence(pre), special=["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"])


def deepseek_llm():
    wide_signs = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
    return deepseek(r"\s?[" + CASED + "]+", wide_signs, r"\s+$")


def deepseek_coder():
    return deepseek(r"\s?\p{L}+", r"\s?\p{P}+")


def unnamed():
    """llama.cpp's "default", of files that name no pre-tokenizer: GPT-2's between three others."""
    gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    patterns = (r"[\p{P}$+<=>^~|]+", gpt2, r"\p{N}+", "[0-9][0-9][0-9]")
    pre = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    pre.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return byte_level(pre_tokenizers.Sequence(pre), special=["<|endoftext|>"])


def granite():
    """StarCoder's digits one by one, with the special tokens of Granite 3."""
    pre = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return byte_level(pre, special=["<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"])


def phi4_mini():
    split = pre_tokenizers.Split(Regex(O200K), "isolated")
    pre = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer = byte_level(pre, special=["<|endoftext|>", "<|assistant|>", "<|end|>", "<|user|>", "<|system|>"])
    tokenizer.add_special_tokens([AddedToken("<|tool|>", normalized=False, special=True)])
    tokenizer.add_tokens([AddedToken("<|tag|>", lstrip=True, rstrip=True, normalized=False)])
    return tokenizer


def deepseek_distill():
    """Llama 3's or Qwen's pipeline with special tokens of letters beyond ASCII."""
    tokenizer = llama3()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in
                                  ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")])
    tokenizer.post_processor = bos_template("<｜begin▁of▁sentence｜>", tokenizer)
    return tokenizer


def olmo():
    """GPT-NeoX's: NFC, and runs of spaces as added tokens that are looked for in normalized text."""
    tokenizer = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizer=normalizers.NFC(),
                           special=["<|endoftext|>", "<|padding|>"])
    tokenizer.add_tokens([AddedToken(" " * length, normalized=True) for length in range(24, 1, -1)])
    return tokenizer


def digits_byte_level():
    pre = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer = byte_level(pre, special=["<|endoftext|>", "<|im_start|>", "<|im_end|>"], missing_bytes=True)
    # Added tokens of every kind, overlapping each other and the text around them.
    tokenizer.add_tokens([
        AddedToken("word", single_word=True), AddedToken("lef t", lstrip=True), AddedToken("ri ght", rstrip=True),
        AddedToken("both", lstrip=True, rstrip=True, normalized=False), AddedToken("the the", normalized=False),
        AddedToken("the", single_word=True, normalized=False), AddedToken("né"), AddedToken("\u00e9\u00e9"),
    ])
    tokenizer.add_special_tokens([AddedToken("<|strip|>", lstrip=True, rstrip=True, special=True),
                                  AddedToken("<|im", special=True), AddedToken("[one]", single_word=True, special=True)])
    return tokenizer


def smollm2_parts():
    """The vocabulary in the demo model, or None."""
    path = os.environ.get("NFP_DEMO_MODEL", "")
    if not path or not pathlib.Path(path).exists():
        return None
    import gguf
    fields = gguf.GGUFReader(path).fields
    return {key: fields[f"tokenizer.ggml.{key}"].contents() for key in
            ("model", "pre", "tokens", "token_type", "merges", "bos_token_id", "eos_token_id", "unknown_token_id",
             "padding_token_id", "add_bos_token", "add_space_prefix")}


def smollm2():
    parts = smollm2_parts()
    if parts is None:
        return None
    merges = [tuple(merge.split(" ")) for merge in parts["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(parts["tokens"])}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    special = [t for t, kind in zip(parts["tokens"], parts["token_type"]) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    return tokenizer


def sentencepiece(size=3000, fuse_unk=True, byte_fallback=True, special=("<unk>", "<s>", "</s>")):
    """Merges trained word by word with marks in front; the caller puts the pipeline around it."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=fuse_unk, byte_fallback=byte_fallback))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    special = list(special)
    if byte_fallback:
        special += [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False, limit_alphabet=120)
    tokenizer.train_from_iterator(training_text(), trainer)
    spec = json.loads(tokenizer.to_str())
    # Bytes are ordinary tokens of the model, as in Llama 2's file.
    spec["added_tokens"] = [t for t in spec["added_tokens"] if not t["content"].startswith("<0x")]
    # Runs of marks, as SentencePiece has for indentation.
    vocab, merges = spec["model"]["vocab"], spec["model"]["merges"]
    for length in (2, 4, 8):
        vocab[MARK * length] = max(vocab.values()) + 1
        merges.append([MARK * (length // 2)] * 2)
    return spec


def finish(spec, normalizer=None, pre_tokenizer=None, decoder=None, bos="<s>"):
    spec["pre_tokenizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    if normalizer:
        tokenizer.normalizer = normalizer
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoder
    tokenizer.post_processor = bos_template(bos, tokenizer)
    return tokenizer


def llama2():
    normalizer = normalizers.Sequence([normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)])
    decoder = decoders.Sequence(
        [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return finish(sentencepiece(), normalizer=normalizer, decoder=decoder)


def phi3():
    """Llama 2's with special tokens that take the spaces behind them."""
    tokenizer = llama2()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, rstrip=True, special=True) for t in
                                  ("<|assistant|>", "<|user|>", "<|system|>", "<|end|>")])
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", normalized=False, special=True)])
    tokenizer.add_tokens([AddedToken("</s>", normalized=False, rstrip=True)])
    return tokenizer


def llama2_crossing():
    """Llama 2 with a token that joins a letter and a following space, so that the text must not be cut at spaces."""
    spec = sentencepiece()
    vocab = spec["model"]["vocab"]
    for token in ("e" + MARK, "." + MARK):
        vocab[token] = max(vocab.values()) + 1
        spec["model"]["merges"].insert(5, [token[0], MARK])
    normalizer = normalizers.Sequence([normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)])
    decoder = decoders.Sequence(
        [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return finish(spec, normalizer=normalizer, decoder=decoder)


def mistral():
    decoder = decoders.Sequence(
        [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return finish(sentencepiece(special=("<unk>", "<s>", "</s>", "[INST]", "[/INST]")),
                  pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first", split=False), decoder=decoder)


def gemma():
    decoder = decoders.Sequence([decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = finish(sentencepiece(special=("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")),
                       normalizer=normalizers.Replace(" ", MARK), decoder=decoder, bos="<bos>",
                       pre_tokenizer=pre_tokenizers.Split(" ", "merged_with_previous"))
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("\n", "\n\n", "\n\n\n", MARK * 2, "<table>")])
    return tokenizer


def metaspace_unknown():
    """No byte fallback: unknown characters become one unknown token each; the Metaspace decoder."""
    return finish(sentencepiece(fuse_unk=False, byte_fallback=False),
                  pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="always"), decoder=decoders.Metaspace())


def unigram(byte_fallback=True):
    """Trained word by word with marks in front; the caller puts the pipeline around it."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(vocab_size=2000, special_tokens=["<unk>", "<s>", "</s>", "<pad>"],
                                      unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(training_text(), trainer)
    spec = json.loads(tokenizer.to_str())
    model = spec["model"]
    model["byte_fallback"] = byte_fallback
    if byte_fallback:
        model["vocab"] += [[f"<0x{byte:02X}>", 0.0] for byte in range(256)]
    return spec


def helium():
    """A line end is a token in the place of its byte."""
    spec = unigram()
    for entry in spec["model"]["vocab"]:
        if entry[0] == "<0x0A>":
            entry[0] = "\n"
    decoder = decoders.Sequence(
        [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = finish(spec, normalizer=normalizers.Sequence([normalizers.Prepend(" "), normalizers.Replace(" ", MARK)]),
                       pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split("\n", "contiguous")]),
                       decoder=decoder)
    tokenizer.add_tokens([AddedToken("\n", normalized=False)])
    return tokenizer


def unigram_metaspace():
    """No byte fallback, words one by one."""
    normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    return finish(unigram(byte_fallback=False), normalizer=normalizer,
                  pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="always"), decoder=decoders.Metaspace())


def unigram_whole():
    """The whole text is one piece."""
    decoder = decoders.Sequence([decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()])
    return finish(unigram(), normalizer=normalizers.Replace(" ", MARK), decoder=decoder)


def llm_jp():
    """llm-jp's of version 2 and later: no pre-tokenizer, and a decoder with regular expressions."""
    normalizer = normalizers.Sequence([normalizers.Replace(Regex(r"(?<!\n)^"), MARK), normalizers.Replace(Regex(" "), MARK)])
    decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Replace(Regex(MARK), " "), decoders.Fuse(),
                                 decoders.Replace(Regex(r"(?<!\n)^ "), "")])
    tokenizer = finish(unigram(), normalizer=normalizer, decoder=decoder)
    tokenizer.post_processor = processors.TemplateProcessing(single=["$0", "</s>"], pair=["$A", "</s>", "$B:1", "</s>:1"],
                                                             special_tokens=[("</s>", 2)])
    return tokenizer


def splits():
    """The splitting pre-tokenizers that no well-known model combines like this."""
    pre = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"[aeiou]+"), "merged_with_next"), pre_tokenizers.Split("l", "merged_with_previous"),
        pre_tokenizers.Split(Regex(r"\s+|[!-/]"), "contiguous"),
        pre_tokenizers.Split(Regex(r"[^\s\d]+|\h"), "isolated", invert=True), pre_tokenizers.Digits(False),
        pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False),
    ])
    return byte_level(pre, normalizer=normalizers.Sequence([normalizers.NFKD(), normalizers.Strip()]), special=["<s>"])


def whitespace():
    pre = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.CharDelimiterSplit("-"),
                                   pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return byte_level(pre, normalizer=normalizers.NFKC(), special=["<s>"])


ALL = [gpt2, gpt2_prefix, llama3, llama3_odd_merges, deepseek_distill, qwen2, tekken, cl100k, glm4, minicpm5, viking, seed, deepseek_llm,
       deepseek_coder, phi4_mini, olmo, digits_byte_level, unnamed, granite, smollm2, llama2, llama2_crossing, phi3,
       mistral, gemma, metaspace_unknown, helium, unigram_metaspace, unigram_whole, llm_jp, splits, whitespace]


def dump_vocab(parts, path):
    """The vocabulary of a GGUF file for nfp_tokenize --vocab."""
    def number(value):
        return struct.pack("<i", -1 if value is None else int(value))

    def string(text):
        data = text.encode()
        return number(len(data)) + data

    def strings(texts):
        return number(len(texts)) + b"".join(map(string, texts))

    scores = parts.get("scores", [])
    pathlib.Path(path).write_bytes(b"".join([
        string(parts["model"]), string(parts["pre"]), strings(parts["tokens"]),
        number(len(parts["token_type"])), *map(number, parts["token_type"]),
        number(len(scores)), *(struct.pack("<f", score) for score in scores), strings(parts["merges"]),
        *(number(parts.get(f"{role}_token_id")) for role in ("bos", "eos", "unknown", "padding")),
        *(number(parts.get(key)) for key in ("add_bos_token", "add_eos_token", "add_space_prefix")),
    ]))


def gguf_parts_of_byte_level(tokenizer, pre, bos=None):
    """A GGUF vocabulary of model "gpt2" equal to the given tokenizer."""
    spec = json.loads(tokenizer.to_str())
    vocab = spec["model"]["vocab"] | {t["content"]: t["id"] for t in spec["added_tokens"]}
    added = {t["content"]: 3 if t["special"] else 4 for t in spec["added_tokens"]}
    tokens = sorted(vocab, key=vocab.get)
    return {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": [added.get(t, 1) for t in tokens],
            "merges": [" ".join(merge) for merge in spec["model"]["merges"]], "bos_token_id": bos}


def gguf_parts_of_sentencepiece(tokenizer):
    """A GGUF vocabulary of model "llama" equal to the given tokenizer: a token's score is its id, negative."""
    spec = json.loads(tokenizer.to_str())
    vocab, added = spec["model"]["vocab"], {t["content"] for t in spec["added_tokens"]}
    tokens = sorted(vocab, key=vocab.get)
    kinds = [3 if t in added else 6 if re.fullmatch("<0x[0-9A-F]{2}>", t) else 1 for t in tokens]
    order = {a + b: rank for rank, (a, b) in reversed(list(enumerate(spec["model"]["merges"])))}
    scores = [-float(order.get(t, 1e6)) for t in tokens]
    return {"model": "llama", "pre": "", "tokens": tokens, "token_type": kinds, "scores": scores, "merges": [],
            "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
