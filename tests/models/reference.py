"""The forward pass of the Llama, Mistral and Qwen families in float64 with numpy, and the weights as each precision sees them.

An oracle beside transformers: make_golden.py measures with it how far an FP32 forward is from the true value, and
check_golden.py checks the committed goldens with it where there is no PyTorch.
"""

import glob
import json
import os

import numpy as np

import safetensors_file


class Model:
    def __init__(self, folder):
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            self.config = json.load(file)
        self.weights = {}
        for path in sorted(glob.glob(os.path.join(folder, "*.safetensors"))):
            for name, (dtype, array) in safetensors_file.read(path).items():
                self.weights[name] = safetensors_file.to_f32(dtype, array)

    def linear_names(self):
        """The matrices that docs/format.md nests."""
        return [name for name in self.weights if name.endswith("_proj.weight") or name == "lm_head.weight"]


def e4m3_values():
    """The 127 finite non-negative E4M3 numbers, ascending; the index is the bit pattern."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def round_to_e4m3(values):
    """Round to nearest, ties to even; |values| <= 448."""
    grid = e4m3_values()
    magnitude = np.abs(values)
    above = np.clip(np.searchsorted(grid, magnitude), 1, 126)
    below = above - 1
    to_below, to_above = magnitude - grid[below], grid[above] - magnitude
    up = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    return np.sign(values) * np.where(up, grid[above], grid[below])


def row_exponents(matrix):
    """Exponents e [n] such that matrix * 2^-e nests without loss (docs/format.md), or None where a row has none.
    Only exponents >= 0 are looked for: smaller ones change nothing in a value that FP16 holds exactly."""
    largest = np.abs(matrix).max(axis=1)
    exponents = np.zeros(matrix.shape[0], np.int64)
    while (over := largest * 2.0**-exponents > 1.75).any():
        exponents[over] += 1
    scaled = matrix * 2.0 ** -exponents[:, None]
    if (scaled.astype(np.float16).astype(np.float64) != scaled).any():
        return None
    return exponents


def weights_in(model, precision):
    """name -> float64 weights as an `fp16` or an `fp8` step sees them, and the nesting statistics."""
    weights, stats = {}, {"matrices": 0, "by_paper": 0, "rows_with_exponent": 0, "dense": []}
    linear = set(model.linear_names())
    for name, values in model.weights.items():
        weights[name] = values.astype(np.float64)
        if name not in linear:
            continue
        exact = values.astype(np.float16).astype(np.float64)
        weights[name] = exact
        exponents = row_exponents(exact)
        stats["matrices"] += 1
        stats["by_paper"] += int(np.abs(exact).max() <= 1.75)
        if exponents is None:
            stats["dense"].append(name)
            continue
        stats["rows_with_exponent"] += int((exponents > 0).sum())
        if precision == "fp8" and name != "lm_head.weight":
            scale = 2.0 ** exponents[:, None]
            weights[name] = round_to_e4m3(exact / scale * 256.0) / 256.0 * scale
    return weights, stats


def rope_frequencies(config, head_dim):
    frequencies = config["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)
    scaling = config.get("rope_scaling")
    if not scaling:
        return frequencies
    if scaling["rope_type"] == "linear":
        return frequencies / scaling["factor"]
    assert scaling["rope_type"] == "llama3"
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (smooth + (1 - smooth) / factor)


def round_to_bf16(values):
    bits = safetensors_file.f32_to_bf16(values.astype(np.float32))
    return safetensors_file.to_f32("BF16", bits).astype(np.float64)


def windows(config):
    """For each layer how many keys a token sees, itself included; None = all."""
    layers = config["num_hidden_layers"]
    if config["model_type"] not in ("qwen2", "qwen3"):
        return [config.get("sliding_window")] * layers
    window = config["sliding_window"] if config.get("use_sliding_window") else None
    sliding = [i >= config.get("max_window_layers", 28) for i in range(layers)]
    if config.get("layer_types"):
        sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
    return [window if slides else None for slides in sliding]


def logits(config, weights, tokens, bf16_inputs=()):
    """Logits [tokens, vocabulary] in float64 of one sequence from its start. The inputs of the matrices named in
    `bf16_inputs` are rounded to BF16, as CPUs with BF16 dot products do in FP8 steps."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    count = len(tokens)

    def linear(x, name):
        if name + ".weight" in bf16_inputs:
            x = round_to_bf16(x)
        return x @ weights[name + ".weight"].T + weights.get(name + ".bias", 0.0)

    def norm(x, name):
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + config["rms_norm_eps"]) * weights[name]

    def head_norm(x, name):
        return norm(x, name) if name in weights else x

    angles = np.arange(count)[:, None] * rope_frequencies(config, head_dim)[None, :]
    cos, sin = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]

    def rotate(x):  # [tokens, heads, head_dim]; the two halves of a head are the pairs' parts
        a, b = x[..., : head_dim // 2], x[..., head_dim // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    distance = np.arange(count)[:, None] - np.arange(count)[None, :]
    x = weights["model.embed_tokens.weight"][tokens]
    for layer, window in enumerate(windows(config)):
        mask = np.where((distance < 0) | (distance >= (window or count)), -np.inf, 0.0)
        prefix = f"model.layers.{layer}."
        h = norm(x, prefix + "input_layernorm.weight")
        q = linear(h, prefix + "self_attn.q_proj").reshape(count, heads, head_dim)
        k = linear(h, prefix + "self_attn.k_proj").reshape(count, kv_heads, head_dim)
        q = rotate(head_norm(q, prefix + "self_attn.q_norm.weight"))
        k = rotate(head_norm(k, prefix + "self_attn.k_norm.weight"))
        v = linear(h, prefix + "self_attn.v_proj").reshape(count, kv_heads, head_dim)
        out = np.empty((count, heads, head_dim))
        for head in range(heads):
            kv = head * kv_heads // heads
            scores = q[:, head] @ k[:, kv].T / np.sqrt(head_dim) + mask
            scores = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head] = scores / scores.sum(axis=1, keepdims=True) @ v[:, kv]
        x = x + linear(out.reshape(count, -1), prefix + "self_attn.o_proj")
        h = norm(x, prefix + "post_attention_layernorm.weight")
        gate = linear(h, prefix + "mlp.gate_proj")
        h = gate / (1 + np.exp(-gate)) * linear(h, prefix + "mlp.up_proj")
        x = x + linear(h, prefix + "mlp.down_proj")
    head_name = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return norm(x, "model.norm.weight") @ weights[head_name].T
