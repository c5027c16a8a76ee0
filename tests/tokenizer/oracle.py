"""Our tokenizer against the `tokenizers` package, on every pipeline of pipelines.py: all of WikiText-2's test set as one
text, every fourth line of it by itself, and random texts; ids with and without special tokens, decode, and the stream
of decoded text.

    oracle.py NFP_TOKENIZE WORK_FOLDER [--count N] [--seed N] [--only NAME]
"""

import argparse
import pathlib
import random
import struct
import subprocess
import sys
import time
import unicodedata

try:
    import tokenizers
except ImportError:
    print("SKIPPED: the Python package `tokenizers` is not installed")
    sys.exit(77)

import pipelines
import random_text


class Ours:
    """A running nfp_tokenize."""

    def __init__(self, tool, *arguments):
        self.process = subprocess.Popen([tool, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, op, flags, data):
        self.process.stdin.write(op + struct.pack("<II", flags, len(data)) + data)
        self.process.stdin.flush()
        head = self.process.stdout.read(4)
        if len(head) < 4:
            raise RuntimeError(f"nfp_tokenize ended with {self.process.wait()}")
        return self.process.stdout.read(struct.unpack("<I", head)[0])

    def encode(self, text, add_special=True, parse_special=True):
        data = self.ask(b"e", add_special | parse_special << 1, text.encode())
        return list(struct.unpack(f"<{len(data) // 4}i", data))

    def decode(self, ids, skip_special=True, stream=False):
        data = self.ask(b"s" if stream else b"d", int(skip_special), struct.pack(f"<{len(ids)}i", *ids))
        return data.decode()

    def close(self):
        self.process.stdin.close()
        return self.process.wait()


class Theirs:
    """A tokenizer of the package, which remembers what it encoded: most of this test's time."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.vocabulary = tokenizer.get_vocab_size()  # slow
        self.ids = {}

    def encode(self, text, add_special=True, parse_special=True):
        key = text, add_special, parse_special
        if key not in self.ids:
            self.tokenizer.encode_special_tokens = not parse_special
            # without offsets, which would take most of the time
            self.ids[key] = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
        return self.ids[key]

    def decode(self, ids, skip_special):
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special)


def known_alike(c):
    """Characters of Unicode 14 and earlier: the two sides have tables of different age."""
    return AGE_OK[ord(c)]


def age_table():
    # Python 3.11 has Unicode 14; later ones know more characters. What they do not know is out.
    blocks_after_14 = [(0x1B155, 0x1B155), (0x11F00, 0x11F5F), (0x1E4D0, 0x1E4FF), (0x2EBF0, 0x2EE5D),
                       (0x31350, 0x323AF), (0x1D2C0, 0x1D2DF), (0x10D40, 0x10D8F), (0x105C0, 0x105FF),
                       (0x10780, 0x107BA),  # of Unicode 14, but NFKC of the package does not know it
                       (0x1C89, 0x1C8A), (0x10EFD, 0x10EFF), (0x11B00, 0x11B5F), (0x1E030, 0x1E08F)]
    table = bytearray(0x110000)
    for c in range(0x110000):
        table[c] = unicodedata.category(chr(c)) not in ("Cn", "Cs")
    for begin, end in blocks_after_14:
        table[begin:end + 1] = bytes(end + 1 - begin)
    return table


AGE_OK = age_table()


class Mismatch(Exception):
    pass


def same(what, text, ours, theirs):
    if ours == theirs:
        return
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
    raise Mismatch(f"{what} differ at {at} of {len(theirs)}: ours {ours[at:at + 8]!r}, theirs {theirs[at:at + 8]!r}\n"
                   f"  text: {text[:400]!r}")


def byte_run_is_broken(tokenizer, ids):
    """Whether a run of byte-fallback tokens is not UTF-8: there a stream shows what decode takes back."""
    run = b""
    for token in [*(tokenizer.id_to_token(i) for i in ids), ""]:
        if token and len(token) == 6 and token.startswith("<0x"):
            run += bytes([int(token[3:5], 16)])
            continue
        try:
            run.decode()
        except UnicodeDecodeError:
            return True
        run = b""
    return False


def compare(ours, theirs, text, rng, thorough):
    ids = theirs.encode(text)
    same("ids", text, ours.encode(text), ids)
    if not thorough or len(text) > 100_000:
        return
    same("ids without special tokens", text, ours.encode(text, add_special=False), theirs.encode(text, add_special=False))
    same("ids of special tokens as text", text, ours.encode(text, parse_special=False), theirs.encode(text, parse_special=False))
    if len(text) > 2000:
        return
    shuffled = [rng.randrange(theirs.vocabulary) for _ in range(rng.randint(0, 20))]
    for sequence in (ids, ids[len(ids) // 3:], rng.sample(ids, len(ids)), shuffled):
        for skip in (True, False):
            expected = theirs.decode(sequence, skip)
            same(f"decode (skip_special={skip}) of {sequence}", text, ours.decode(sequence, skip), expected)
            if not byte_run_is_broken(theirs.tokenizer, sequence):
                same(f"stream (skip_special={skip}) of {sequence}", text, ours.decode(sequence, skip, True), expected)


def run(name, theirs, arguments, tool, texts, count, seed):
    start = time.monotonic()
    ours = Ours(tool, *arguments)
    rng = random.Random(seed)
    done = 0
    try:
        for text in texts:
            compare(ours, theirs, text, rng, done < 50)
            done += 1
        for text in random_text.texts(seed, count, known_alike):
            compare(ours, theirs, text, rng, True)
            done += 1
    except Mismatch as mismatch:
        print(f"FAILED {name}: text {done}: {mismatch}", flush=True)
        return False
    finally:
        ours.close()
    print(f"passed {name}: {done} texts in {time.monotonic() - start:.1f} s", flush=True)
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tool")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)

    wikitext = pipelines.wikitext()
    runs = ["a", " ", "\n", " \n", "7", "ab", "the", "e\u0301", "\u0301", "'", "中文", "<|im", pipelines.MARK]
    texts = [""] + [run * 3000 for run in runs] + [" " * 3000 + "x"]
    if wikitext is None:
        print("note: wikitext2-test.txt is not there (NFP_SHARED_DATA); random texts only")
    else:
        texts += [wikitext, *wikitext.splitlines(keepends=True)[::4]]
    print(f"tokenizers {tokenizers.__version__}")
    good = True
    for make in pipelines.ALL:
        name = make.__name__
        if arguments.only and arguments.only != name:
            continue
        theirs = make()
        if theirs is None:
            print(f"skipped {name}: the demo model is not there (NFP_DEMO_MODEL)")
            continue
        path = arguments.folder / f"{name}.json"
        theirs.save(str(path))
        theirs = tokenizers.Tokenizer.from_file(str(path))
        oracle = Theirs(theirs)
        good &= run(name, oracle, [path], arguments.tool, texts, arguments.count, arguments.seed)
        parts = {"smollm2": pipelines.smollm2_parts,
                 "gpt2": lambda: pipelines.gguf_parts_of_byte_level(theirs, "gpt-2"),
                 "llama3": lambda: pipelines.gguf_parts_of_byte_level(theirs, "llama-bpe", bos=0),
                 "qwen2": lambda: pipelines.gguf_parts_of_byte_level(theirs, "qwen2"),
                 "cl100k": lambda: pipelines.gguf_parts_of_byte_level(theirs, "dbrx"),
                 "glm4": lambda: pipelines.gguf_parts_of_byte_level(theirs, "glm4"),
                 "minicpm5": lambda: pipelines.gguf_parts_of_byte_level(theirs, "minicpm5"),
                 "viking": lambda: pipelines.gguf_parts_of_byte_level(theirs, "viking"),
                 "seed": lambda: pipelines.gguf_parts_of_byte_level(theirs, "seed-coder"),
                 "deepseek_llm": lambda: pipelines.gguf_parts_of_byte_level(theirs, "deepseek-llm"),
                 "deepseek_coder": lambda: pipelines.gguf_parts_of_byte_level(theirs, "deepseek-coder"),
                 "unnamed": lambda: pipelines.gguf_parts_of_byte_level(theirs, ""),
                 "granite": lambda: pipelines.gguf_parts_of_byte_level(theirs, "refact"),
                 "tekken": lambda: pipelines.gguf_parts_of_byte_level(theirs, "tekken", bos=1),
                 "llama2": lambda: pipelines.gguf_parts_of_sentencepiece(theirs)}.get(name)
        if parts:
            dump = arguments.folder / f"{name}.vocab"
            pipelines.dump_vocab(parts(), dump)
            good &= run(f"{name} from GGUF", oracle, ["--vocab", dump], arguments.tool, texts, arguments.count,
                        arguments.seed)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
