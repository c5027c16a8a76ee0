#!/usr/bin/env python3
"""A GGUF model's log-probabilities beside llama.cpp's, at every position of a text: on how many the likeliest token is the
same, how close a call it is in both programs where it is not, and both perplexities.

    tests/models/compare_llama_cpp.py --nestedfp build/release/apps/nestedfp --out REPORT.json MODEL.gguf TEXT

Both compute with the same numbers: llama.cpp requantises MODEL to F16, which we read, and that file to F32, which it reads
itself, as it would round activations to F16 beside F16 weights. Keys and values are FP32 on both sides. The text is cut into
chunks of --ctx tokens, each a sequence of its own, after the model's BOS where its file asks for one; both tokenizers must
give the same tokens. mixed_text.txt beside this file is English, C++, Chinese, German and others. Exits with 1 where
perplexities are more than --tolerance apart, or a disagreement is no close call.

Needs llama-cpp-python (0.3.36 was used) and numpy in an environment of its own:

    python3 -m venv VENV && CMAKE_ARGS=-DGGML_NATIVE=ON VENV/bin/pip install llama-cpp-python==0.3.36
"""

import argparse
import hashlib
import json
import math
import pathlib
import re
import subprocess
import sys
import tempfile
import urllib.request

import llama_cpp
import numpy as np

F32, F16 = 0, 1  # llama_ftype, and ggml_type too
TOP = 20  # alternatives that our server is asked for: where the two disagree, the other's token must be among them
QUIET = llama_cpp.llama_log_callback(lambda level, text, data: None)


def requantise(source, target, kind):
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = kind
    parameters.allow_requantize = True
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), parameters) != 0:
        sys.exit(f"{source}: llama.cpp cannot requantise it")


class Ours:
    """nestedfp serve."""

    def __init__(self, program, model, options):
        self.process = subprocess.Popen(
            [program, "serve", model, "--device", options.device, "--port", "0", "--precision-policy", "fp16", "--dtype-kv",
             options.dtype_kv, "--max-model-len", str(options.ctx + 1), "--served-model-name", "m", "--disable-log-requests"],
            stderr=subprocess.PIPE, text=True)
        said = []
        for line in self.process.stderr:
            said.append(line)
            if line.startswith("ready"):
                self.url = re.search(r"http://\S+", line).group(0)
                return
        sys.exit("nestedfp serve ended:\n" + "".join(said))

    def post(self, path, **body):
        request = urllib.request.Request(self.url + path, json.dumps({"model": "m", **body}).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=3600) as answer:
            return json.load(answer)

    def tokens(self, text):
        return self.post("/tokenize", prompt=text, add_special_tokens=False)["tokens"]

    def scores(self, tokens):
        """Of each token but the first its log-probability, and the likeliest tokens' in its place: {id: log-probability}."""
        answer = self.post("/v1/completions", prompt=tokens, max_tokens=1, temperature=0, prompt_logprobs=TOP)
        rows = answer["choices"][0]["prompt_logprobs"][1:]
        tops = [{int(token): entry["logprob"] for token, entry in row.items()} for row in rows]
        return [top[token] for top, token in zip(tops, tokens[1:], strict=True)], tops

    def stop(self):
        self.process.terminate()
        self.process.wait()


class Theirs:
    """llama.cpp, in this process."""

    def __init__(self, model, options):
        self.llama = llama_cpp.Llama(str(model), n_ctx=options.ctx, n_batch=options.ctx, n_ubatch=options.ctx, logits_all=True,
                                     type_k=F32, type_v=F32, flash_attn=False, n_threads=options.threads,
                                     n_threads_batch=options.threads, verbose=False)
        vocabulary = llama_cpp.llama_model_get_vocab(self.llama.model)
        self.bos = [self.llama.token_bos()] if llama_cpp.llama_vocab_get_add_bos(vocabulary) else []

    def tokens(self, text):
        return self.llama.tokenize(text.encode(), add_bos=False, special=True)

    def scores(self, tokens):
        """Log-probabilities [positions, vocabulary] of what follows each token but the last."""
        self.llama.reset()
        self.llama.eval(tokens)
        logits = self.llama.scores[: len(tokens) - 1].astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def compare(ours, theirs, chunks, report):
    our_loss, their_loss, apart, largest = [], [], [], 0.0
    for number, chunk in enumerate(chunks):
        own, tops = ours.scores(chunk)
        rows = theirs.scores(chunk)
        for at, (target, top, row) in enumerate(zip(chunk[1:], tops, rows, strict=True)):
            our_loss.append(-own[at])
            their_loss.append(-row[target])
            largest = max(largest, *(abs(value - row[token]) for token, value in top.items() if row[token] > math.log(1e-4)))
            our_best, their_best = max(top, key=top.get), int(row.argmax())
            if our_best != their_best:
                apart.append({"chunk": number, "position": at + 1, "ours": our_best, "theirs": their_best,
                              # How much likelier each finds its own choice than the other's.
                              "our_margin": top[our_best] - top[their_best] if their_best in top else None,
                              "their_margin": float(row[their_best] - row[our_best])})
        print(f"chunk {number + 1} of {len(chunks)}: {len(our_loss)} positions, {len(apart)} apart", file=sys.stderr)
    perplexities = [math.exp(sum(loss) / len(loss)) for loss in (our_loss, their_loss)]
    report.update(positions=len(our_loss), disagreements=apart, perplexity=perplexities[0],
                  llama_cpp_perplexity=perplexities[1], perplexity_ratio=perplexities[0] / perplexities[1],
                  largest_difference=float(largest))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path, help="a GGUF file")
    parser.add_argument("text", type=pathlib.Path, help="UTF-8")
    parser.add_argument("--nestedfp", required=True, type=pathlib.Path, help="the nestedfp program")
    parser.add_argument("--ctx", type=int, default=256, help="tokens a chunk, BOS included (256)")
    parser.add_argument("--chunks", type=int, default=0, help="at most so many (0 = all whole ones)")
    parser.add_argument("--device", default="cpu", help="of nestedfp (cpu)")
    parser.add_argument("--dtype-kv", default="f32", help="of nestedfp's KV cache (f32; a GPU takes f16)")
    parser.add_argument("--threads", type=int, default=2, help="of llama.cpp (2)")
    parser.add_argument("--tolerance", type=float, default=0.002, help="of the perplexities' ratio (0.002)")
    parser.add_argument("--margin", type=float, default=0.02, help="a disagreement below it is a close call (0.02 nats)")
    parser.add_argument("--out", type=pathlib.Path, help="the report as JSON")
    options = parser.parse_args()

    llama_cpp.llama_log_set(QUIET, None)
    report = {"model": options.model.name, "model_sha256": hashlib.sha256(options.model.read_bytes()).hexdigest(),
              "text": options.text.name, "text_sha256": hashlib.sha256(options.text.read_bytes()).hexdigest(),
              "llama_cpp_python": llama_cpp.__version__, "device": options.device, "dtype_kv": options.dtype_kv,
              "ctx": options.ctx}
    with tempfile.TemporaryDirectory() as folder:
        half, single = pathlib.Path(folder) / "f16.gguf", pathlib.Path(folder) / "f32.gguf"
        requantise(options.model, half, F16)
        requantise(half, single, F32)
        theirs = Theirs(single, options)
        ours = Ours(options.nestedfp, half, options)
        try:
            text = options.text.read_bytes().decode()
            tokens = ours.tokens(text)
            if tokens != list(theirs.tokens(text)):
                sys.exit(f"{options.text}: the two tokenizers disagree on it")
            size = options.ctx - len(theirs.bos)
            chunks = [theirs.bos + tokens[i : i + size] for i in range(0, len(tokens) - size + 1, size)]
            if options.chunks > 0:
                chunks = chunks[: options.chunks]
            if not chunks:
                sys.exit(f"{options.text}: has {len(tokens)} tokens, less than a chunk of {size}; use a smaller --ctx")
            report["chunks"] = len(chunks)
            compare(ours, theirs, chunks, report)
        finally:
            ours.stop()
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{report['model']}: {report['positions']} positions, {len(report['disagreements'])} with another likeliest token; "
          f"perplexity {report['perplexity']:.5f}, llama.cpp {report['llama_cpp_perplexity']:.5f} "
          f"({abs(report['perplexity_ratio'] - 1):.4%} apart); log-probabilities above 1e-4 differ by "
          f"{report['largest_difference']:.1e} at most")
    wide = 0
    for one in report["disagreements"]:
        margins = [one["our_margin"], one["their_margin"]]
        wide += any(margin is None or margin > options.margin for margin in margins)
        shown = " and ".join("more than we list" if m is None else f"{m:.2e}" for m in margins)
        print(f"  chunk {one['chunk']}, position {one['position']}: we {one['ours']}, llama.cpp {one['theirs']}, "
              f"by {shown} nats")
    if wide or abs(report["perplexity_ratio"] - 1) > options.tolerance:
        sys.exit(1)


if __name__ == "__main__":
    main()
