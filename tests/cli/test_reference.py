#!/usr/bin/env python3
"""What the program computes against the float64 forward pass of tests/models/reference.py, on the tiny models."""

import os
import sys
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "models"))

try:
    import numpy as np
    from tokenizers import Tokenizer
except ImportError as missing:
    print(f"skipped: {missing.name} is not installed (scripts/test installs it)")
    sys.exit(77)

import reference
import tiny_tokenizer
from program import ALL_MODELS, MODELS, TINY, Scratch, main, run, run_json

CONTEXT = 32  # tokens a chunk of the perplexity test
# FP8 steps in FP32 arithmetic, where the best kernels of a machine may round activations to BF16.
SCALAR = {**os.environ, "NESTEDFP_CPU": "scalar"}


def tokenizer_of(model):
    return Tokenizer.from_file(os.path.join(model, "tokenizer.json"))


class Generate(unittest.TestCase):
    def test_it_chooses_the_likeliest_tokens(self):
        for model in ALL_MODELS:
            source = reference.Model(model)
            for precision in ("fp16", "fp8"):
                weights, _ = reference.weights_in(source, precision)
                ids = tokenizer_of(model).encode("A river runs").ids
                answer = run_json("generate", model, "-p", "A river runs", "-n", "6", "--precision", precision,
                                  "--ignore-eos", "--dtype-kv", "f32", "--ctx", "128", env=SCALAR)
                self.assertEqual(answer["usage"]["prompt_tokens"], len(ids))
                self.assertEqual(len(answer["tokens"]), 6)
                for token in answer["tokens"]:
                    logits = reference.logits(source.config, weights, ids, context=128)[-1]
                    # Another order of summation may swap only what lies this close.
                    self.assertGreater(logits[token["id"]], logits.max() - 1e-3, (model, precision))
                    ids.append(token["id"])

    def test_the_context_chooses_the_factors_of_longrope(self):
        model = os.path.join(TINY, "phi3-long")
        original = reference.Model(model).config["original_max_position_embeddings"]
        within, beyond = (run("generate", model, "-p", "x", "-n", "1", "--ctx", str(context))[1]
                          for context in (original, original + 1))
        self.assertNotIn("LongRoPE", within)
        self.assertIn(f"a context of {original + 1} tokens is beyond the original {original}", beyond)


class Perplexity(Scratch):
    def distributions(self, model, precision):
        """Log-probabilities [scored, vocabulary] and the tokens scored, as llama.cpp's perplexity tool cuts a text."""
        source = reference.Model(model)
        weights, _ = reference.weights_in(source, precision)
        ids = tokenizer_of(model).encode(tiny_tokenizer.TEXT).ids
        adds_bos = len(tokenizer_of(model).encode("").ids) > 0
        rows, targets = [], []
        for begin in range(0, len(ids) - CONTEXT + 1, CONTEXT):
            chunk = ids[begin : begin + CONTEXT]
            if adds_bos:
                chunk = [source.config["bos_token_id"], *chunk[1:]]
            logits = reference.logits(source.config, weights, chunk)
            peak = logits.max(axis=1, keepdims=True)
            logprobs = logits - peak - np.log(np.exp(logits - peak).sum(axis=1, keepdims=True))
            rows.append(logprobs[CONTEXT // 2 : CONTEXT - 1])
            targets += chunk[CONTEXT // 2 + 1 :]
        return np.concatenate(rows), np.array(targets)

    def test_perplexity_and_divergence(self):
        with open(self.path("text"), "w", encoding="utf-8") as file:
            file.write(tiny_tokenizer.TEXT)
        for model in MODELS:
            common = ["perplexity", model, "--file", self.path("text"), "--ctx", str(CONTEXT), "--dtype-kv", "f32"]
            exact, targets = self.distributions(model, "fp16")
            loss = -exact[np.arange(len(targets)), targets]
            base = self.path("base-" + os.path.basename(model))
            result = run_json(*common, "--save-base", base, env=SCALAR)
            self.assertEqual(result["scored_tokens"], len(targets))
            self.assertAlmostEqual(result["perplexity"] / np.exp(loss.mean()), 1, delta=1e-5)
            # One standard error of the mean loss, carried through the exponential.
            self.assertAlmostEqual(result["error"] / (np.exp(loss.mean()) * loss.std(ddof=1) / len(loss) ** 0.5), 1, delta=1e-3)

            rounded, _ = self.distributions(model, "fp8")
            divergence = (np.exp(exact) * (exact - rounded)).sum(axis=1)
            kld = run_json(*common, "--precision", "fp8", "--kld-base", base, env=SCALAR)["kld"]
            # The base keeps 16 bits of every log-probability.
            self.assertAlmostEqual(kld["mean"] / divergence.mean(), 1, delta=0.05, msg=model)
            self.assertAlmostEqual(kld["p99"] / np.percentile(divergence, 99), 1, delta=0.1, msg=model)
            same = (exact.argmax(axis=1) == rounded.argmax(axis=1)).mean()
            self.assertAlmostEqual(kld["same_top"], same, delta=1.5 / len(targets), msg=model)
            self.assertAlmostEqual(kld["base_perplexity"] / np.exp(loss.mean()), 1, delta=1e-3, msg=model)


if __name__ == "__main__":
    main()
