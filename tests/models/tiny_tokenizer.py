"""A byte-level BPE tokenizer of 512 entries, trained on a page of text the same way on every machine.

Ids: 3 special tokens, 256 bytes, then 253 merges. The pre-tokenizer is one of the four kinds that Llama-like models use.
"""

import collections
import re

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = 512

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a very small model.<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")

TEXT = """A language model reads a text as a row of small pieces, called tokens, and says for each place which token may
come next. The numbers inside it, its weights, are many; reading them from memory takes most of the time of each step.
So the size of a weight decides the speed of the model. A weight of sixteen bits can be cut into two bytes. The upper
byte is a number of its own, rough but good enough for most of the words; the lower byte brings back what was lost. The
machine reads one byte when many people are waiting, and both bytes when there is time. The weather was fine, the river
was high, and nobody in the town had seen the old engine run since the year 1987. They had oiled it, they had painted it,
and on the day of the feast it was to pull the train again. "What is the time?" asked the driver. "It's ten," said the
boy, "and we're late!" The whistle blew, the wheels began to turn, and the children ran beside the train until the
bridge. def step(state, batch): return [state.run(x) for x in batch if x is not None]; x += 1; if (x == 0) { return; }
Der Zug fährt über die Brücke; le train passe sur le pont, déjà; el tren cruza el río. 1 2 3 10 100 1000 3.14 2024.
"""


def byte_to_unicode():
    """GPT-2's table: printable bytes stand for themselves, the others for code points from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table, extra = {}, 0
    for byte in range(256):
        if byte in printable:
            table[byte] = chr(byte)
        else:
            table[byte] = chr(256 + extra)
            extra += 1
    return table


def train(merges_wanted):
    """The merges in order. Among equally frequent pairs the smallest wins, so the result is one and the same everywhere."""
    table = byte_to_unicode()
    words = collections.Counter(re.findall(r" ?[^\W\d_]+| ?\d| ?[^\s\w]+|\s+", TEXT))
    words = {tuple(table[b] for b in word.encode()): count for word, count in words.items()}
    merges = []
    while len(merges) < merges_wanted:
        pairs = collections.Counter()
        for word, count in words.items():
            for pair in zip(word, word[1:]):
                pairs[pair] += count
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        merged = {}
        for word, count in words.items():
            out, i = [], 0
            while i < len(word):
                if word[i : i + 2] == best:
                    out.append(word[i] + word[i + 1])
                    i += 2
                else:
                    out.append(word[i])
                    i += 1
            merged[tuple(out)] = merged.get(tuple(out), 0) + count
        words = merged
    return merges


def pre_tokenizer(kind):
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    if kind == "gpt2":
        return byte_level
    if kind == "smollm2":
        return {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]}
    pattern = {"llama3": LLAMA3_SPLIT, "qwen2": QWEN2_SPLIT}[kind]
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, {**byte_level, "use_regex": False}]}


def post_processor(kind):
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    if kind != "llama3":
        return byte_level
    bos = SPECIAL[0]
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            {"SpecialToken": {"id": bos, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": bos, "type_id": 1}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {bos: {"id": bos, "ids": [0], "tokens": [bos]}},
    }
    return {"type": "Sequence", "processors": [byte_level, template]}


def tokenizer_json(kind):
    """kind: gpt2, smollm2, llama3 or qwen2. The merges are written in the old form (strings) for gpt2, else in the new (pairs)."""
    merges = train(VOCABULARY - 256 - len(SPECIAL))
    table = byte_to_unicode()
    pieces = SPECIAL + [table[b] for b in range(256)] + [a + b for a, b in merges]
    assert len(set(pieces)) == VOCABULARY
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": content, **flags} for i, content in enumerate(SPECIAL)],
        "normalizer": {"type": "NFC"} if kind == "qwen2" else None,
        "pre_tokenizer": pre_tokenizer(kind),
        "post_processor": post_processor(kind),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": kind == "llama3",
            "vocab": {piece: i for i, piece in enumerate(pieces)},
            "merges": [f"{a} {b}" if kind == "gpt2" else [a, b] for a, b in merges],
        },
    }


def tokenizer_config(with_template):
    config = {
        "added_tokens_decoder": {
            str(i): {"content": content, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
            for i, content in enumerate(SPECIAL)
        },
        "bos_token": SPECIAL[0],
        "clean_up_tokenization_spaces": False,
        "eos_token": SPECIAL[2],
        "model_max_length": 512,
        "pad_token": SPECIAL[2],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": SPECIAL[0],
    }
    if with_template:
        config["chat_template"] = CHATML
    return config
