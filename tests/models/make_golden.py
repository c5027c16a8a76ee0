#!/usr/bin/env python3
"""Writes tests/golden/NAME.json: what Hugging Face transformers computes for the tiny models: make_golden.py OUT [NAME...]

Needs torch and transformers (tests/golden/README.md names the versions), or with --numpy only numpy: then reference.py in
float32 takes their place. Tests only read the files. OUT is usually
tests/golden. The models are made in a temporary folder by make_tiny_models.py.
"""

import argparse
import base64
import hashlib
import json
import os
import re
import tempfile

import numpy as np

import make_tiny_models
import reference

LENGTHS = (1, 21, 97)  # 97 tokens reach past the original context of models with RoPE scaling
CONTINUATION = 12
# A greedy continuation is only worth comparing where no other implementation could decide otherwise.
MARGIN = 0.06


def encoded(values):
    return base64.b64encode(np.ascontiguousarray(values, "<f4").tobytes()).decode()


def files_sha256(folder):
    """One checksum over all weight files in the order of their names."""
    total = hashlib.sha256()
    for name in sorted(os.listdir(folder)):
        if name.endswith(".safetensors"):
            with open(os.path.join(folder, name), "rb") as file:
                total.update(file.read())
    return total.hexdigest()


def load(folder, weights):
    """The model in float32 with these weights instead of the file's: tokens -> logits."""
    if transformers is None:
        config = reference.Model(folder).config
        return lambda tokens: reference.logits(config, weights, tokens, dtype=np.float32)
    if "quantization_config" in reference.Model(folder).config:
        # Of a checkpoint that is FP8 already only the configuration is read.
        config = transformers.AutoConfig.from_pretrained(folder)
        del config.quantization_config
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = weights[name].astype(np.float32)
            assert (values.astype(np.float64) == weights[name]).all(), name
            parameter.copy_(torch.from_numpy(values))

    def run(tokens):
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0].numpy()

    return run


def continuation(model, tokens):
    """Greedy tokens without a cache, and the smallest lead of a chosen token over the next one."""
    chosen, margin = [], np.inf
    for _ in range(CONTINUATION):
        last = model(tokens + chosen)[-1]
        second, first = np.sort(last)[-2:]
        margin = min(margin, float(first - second))
        chosen.append(int(last.argmax()))
    return chosen, margin


def log_sum_exp(values):
    peak = values.max(axis=1, keepdims=True)
    return (peak + np.log(np.exp(values.astype(np.float64) - peak).sum(axis=1, keepdims=True)))[:, 0]


def libraries():
    return {} if transformers is None else {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}


def golden(folder, name):
    source = reference.Model(folder)
    config = source.config
    result = {
        "model": name,
        "weights_sha256": files_sha256(folder),
        "made_with": {**libraries(), "numpy": np.__version__},
    }
    spec = make_tiny_models.MODELS[name]
    random = make_tiny_models.Random(spec["seed"] + 1000)
    least = spec.get("least_tokens", 1)
    prompts = [random.integers(3, config["vocab_size"], max(length, least)) for length in LENGTHS]
    for precision in ("fp16", "fp8"):
        weights, stats = reference.weights_in(source, precision)
        model = load(folder, weights)
        result["nesting"] = stats
        entry = {"fp32_error": 0.0, "sequences": []}
        for tokens in prompts:
            values = model(tokens)
            exact = reference.logits(config, weights, tokens)
            entry["fp32_error"] = max(entry["fp32_error"], float(np.abs(values - exact).max()))
            sequence = {"tokens": tokens, "last_logits": encoded(values[-1])}
            if precision == "fp16":
                sequence["argmax"] = [int(i) for i in values.argmax(axis=1)]
                sequence["max_logit"] = encoded(values.max(axis=1))
                sequence["log_sum_exp"] = encoded(log_sum_exp(values))
            if precision == "fp8":
                nested = [name for name in source.linear_names() if name not in (*stats["dense"], "lm_head.weight")]
                rounded = reference.logits(config, weights, tokens, nested)
                sequence["bf16_error"] = float(np.abs(rounded[-1] - exact[-1]).max())
            entry["sequences"].append(sequence)
        for attempt in range(1000):
            start = random.integers(3, config["vocab_size"], max(8, least))
            chosen, margin = continuation(model, start)
            if margin >= MARGIN and len(set(chosen)) > 2:
                break
        else:
            raise SystemExit(f"{name}: no prompt has a continuation with a margin of {MARGIN}")
        entry["greedy"] = {"tokens": start, "continuation": chosen, "margin": round(margin, 4)}
        result[precision] = entry
        print(f"{name} {precision}: FP32 error {entry['fp32_error']:.2e}, logits' deviation {values.std():.2f}, "
              f"margin {margin:.3f} after {attempt + 1} tries, nesting {stats}")
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--numpy", action="store_true", help="without transformers")
    arguments = parser.parse_args()
    global torch, transformers
    if arguments.numpy:
        torch = transformers = None
    else:
        import torch
        import transformers

        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.names or make_tiny_models.MODELS:
            result = golden(make_tiny_models.make_model(folder, name), name)
            with open(os.path.join(arguments.out, name + ".json"), "w", encoding="utf-8") as file:
                # One line per list of numbers.
                file.write(re.sub(r"\[\s+([-\d,\s]+?)\s+\]", lambda m: "[" + re.sub(r"\s+", " ", m[1]) + "]", json.dumps(result, indent=1)))
                file.write("\n")


if __name__ == "__main__":
    main()
