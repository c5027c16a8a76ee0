"""The forward pass of the families in float64 with numpy, and the weights as each precision sees them.

An oracle beside transformers: make_golden.py measures with it how far an FP32 forward is from the true value, and
check_golden.py checks the committed goldens with it where there is no PyTorch.
"""

import glob
import json
import os

import numpy as np

import e4m3
import make_tiny_models
import safetensors_file


class Model:
    def __init__(self, folder):
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            self.config = json.load(file)
        stored = {}
        for path in sorted(glob.glob(os.path.join(folder, "*.safetensors"))):
            stored.update(safetensors_file.read(path))
        self.weights = {}
        self.scaled_by_rows = set()  # FP8 in the file, with a scale a row or a matrix
        for name, (dtype, array) in stored.items():
            if dtype == "F8_E4M3":
                self.weights[name] = self.dequantised(name, array, stored)
            elif not name.endswith(("_scale", "_scale_inv")):
                self.weights[name] = safetensors_file.to_f32(dtype, array)

    def dequantised(self, name, codes, stored):
        scales = safetensors_file.to_f32(*stored.get(name + "_scale", stored.get(name + "_scale_inv"))).astype(np.float64)
        rows, columns = codes.shape
        if scales.ndim == 2 and scales.shape[1] > 1 or name + "_scale_inv" in stored:
            down, across = self.config["quantization_config"]["weight_block_size"]
            scales = np.repeat(np.repeat(scales, down, 0)[:rows], across, 1)[:, :columns]
        else:
            scales = scales.reshape(-1, 1)
            self.scaled_by_rows.add(name)
        return e4m3.number_of(codes) * scales

    def linear_names(self):
        """The matrices that docs/format.md nests."""
        return [name for name in self.weights if name.endswith("_proj.weight") or ".experts." in name or name == "lm_head.weight"]


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
        stats["matrices"] += 1
        if name in model.scaled_by_rows:  # both precisions have the file's very weights
            stats["by_paper"] += int(np.abs(values).max() <= 1.75)
            continue
        exact = values.astype(np.float16).astype(np.float64)
        weights[name] = exact
        exponents = row_exponents(exact)
        stats["by_paper"] += int(np.abs(exact).max() <= 1.75)
        if exponents is None:
            stats["dense"].append(name)
            continue
        stats["rows_with_exponent"] += int((exponents > 0).sum())
        if precision == "fp8" and name != "lm_head.weight":
            scale = 2.0 ** exponents[:, None]
            weights[name] = e4m3.nearest(exact / scale * 256.0) / 256.0 * scale
    return weights, stats


def rope(config, dim, context):
    """The angle that a position adds for each pair of a head's first `dim` features, and a factor of cosines and sines,
    where positions stay below `context`."""
    base = config["rope_theta"]
    frequencies = base ** (-np.arange(0, dim, 2) / dim)
    scaling = config.get("rope_scaling")
    if not scaling:
        return frequencies, 1.0
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "linear":
        return frequencies / scaling["factor"], 1.0
    if kind == "longrope":
        original = config["original_max_position_embeddings"]
        extension = config["max_position_embeddings"] / original
        divisors = scaling["long_factor" if context > original else "short_factor"]
        return frequencies / np.array(divisors), np.sqrt(1 + np.log(extension) / np.log(original))
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    if kind == "yarn":
        low, high = (dim * np.log(original / (turns * 2 * np.pi)) / (2 * np.log(base)) for turns in (32, 1))
        low, high = max(np.floor(low), 0), min(np.ceil(high), dim - 1)
        stretched = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
        return frequencies * (1 - stretched + stretched / factor), 0.1 * np.log(factor) + 1.0
    assert kind == "llama3"
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = original * frequencies / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (smooth + (1 - smooth) / factor), 1.0


def round_to_bf16(values):
    bits = safetensors_file.f32_to_bf16(values.astype(np.float32))
    return safetensors_file.to_f32("BF16", bits).astype(np.float64)


def rotating(config):
    """For each layer whether its heads rotate."""
    layers = config["num_hidden_layers"]
    if config["model_type"] == "exaone4" and config["sliding_window"]:
        return [window is not None for window in windows(config)]
    if config["model_type"] != "smollm3":
        return [True] * layers
    interval = config["no_rope_layer_interval"]
    return config.get("no_rope_layers") or [(layer + 1) % interval != 0 for layer in range(layers)]


def windows(config):
    """For each layer how many keys a token sees, itself included; None = all."""
    layers = config["num_hidden_layers"]
    # Of these families: one layer in so many sees everything, unless layer_types says which.
    patterns = {"gemma2": 2, "gemma3_text": config.get("sliding_window_pattern", 6), "olmo3": 4,
                "exaone4": config.get("sliding_window_pattern", 4), "ministral": layers + 1}
    if pattern := patterns.get(config["model_type"]):
        kinds = config.get("layer_types") or ["sliding_attention" if (i + 1) % pattern else "" for i in range(layers)]
        return [config["sliding_window"] if kind == "sliding_attention" else None for kind in kinds]
    if config["model_type"] == "smollm3":
        window = config["sliding_window"] if config["use_sliding_window"] else None
        return [None if rotates else window for rotates in rotating(config)]
    if config["model_type"] in ("qwen2_moe", "qwen3_moe"):
        return [config["sliding_window"] if config["use_sliding_window"] else None] * layers
    if config["model_type"] not in ("qwen2", "qwen3"):
        return [config.get("sliding_window")] * layers
    window = config["sliding_window"] if config.get("use_sliding_window") else None
    sliding = [i >= config.get("max_window_layers", 28) for i in range(layers)]
    if config.get("layer_types"):
        sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
    return [window if slides else None for slides in sliding]


def logits(config, weights, tokens, bf16_inputs=(), dtype=np.float64, context=0):
    """Logits [tokens, vocabulary], in `dtype`, of one sequence from its start. The inputs of the matrices named in
    `bf16_inputs` are rounded to BF16, as CPUs with BF16 dot products do in FP8 steps. `context`: what a server has room
    for, which LongRoPE's factors depend on; 0 = these tokens, as in transformers."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    count = len(tokens)
    weights = {name: values.astype(dtype) for name, values in weights.items()}
    gemma = config["model_type"].startswith("gemma")
    pre_norms = config["model_type"] not in ("olmo2", "olmo3", "exaone4")
    post_norms = config["model_type"] in ("gemma2", "gemma3_text", "olmo2", "olmo3", "exaone4", "glm4")
    glm = config["model_type"].startswith("glm")
    cap, logit_cap = config.get("attn_logit_softcapping"), config.get("final_logit_softcapping")

    def linear(x, name):
        if name + ".weight" in bf16_inputs:
            x = round_to_bf16(x).astype(dtype)
        return x @ weights[name + ".weight"].T + weights.get(name + ".bias", 0.0)

    def norm(x, name):
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + config["rms_norm_eps"]) * (weights[name] + gemma)

    def head_norm(x, name):  # of each head, or of all of them where the weights are as many
        if name not in weights:
            return x
        whole = x.reshape(count, -1) if weights[name].size != x.shape[2] else x
        return norm(whole, name).reshape(x.shape)

    def pre_norm(x, name):
        return norm(x, name) if pre_norms else x

    def post_norm(x, name):
        return norm(x, name) if post_norms else x

    def activation(x):
        if gemma:
            return 0.5 * x * (1 + np.tanh(float(np.sqrt(2 / np.pi)) * (x + 0.044715 * x**3)))
        return x / (1 + np.exp(-x))

    half = int(head_dim * config.get("partial_rotary_factor", 0.5 if glm else 1.0)) // 2

    def gated(x, names):
        gate, up, down = (name.removesuffix(".weight") for name in names)
        return linear(activation(linear(x, gate)) * linear(x, up), down)

    def experts(x, layer):
        mixtral = config["model_type"] == "mixtral"
        block = f"model.layers.{layer}." + ("block_sparse_moe" if mixtral else "mlp")
        scores = linear(x, block + ".gate")
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
        chosen = np.argsort(-scores, axis=1)[:, : config["num_experts_per_tok"]]
        rows = np.arange(count)[:, None]
        share = np.zeros_like(scores)
        share[rows, chosen] = scores[rows, chosen]
        if mixtral or config["norm_topk_prob"]:
            share /= share.sum(axis=1, keepdims=True)
        out = np.zeros_like(x)
        for expert in range(scores.shape[1]):
            mine = np.flatnonzero(share[:, expert])
            names = make_tiny_models.expert_names(config, layer, expert)
            out[mine] += gated(x[mine], names) * share[mine, expert, None]
        if block + ".shared_expert_gate.weight" in weights:
            gate = 1 / (1 + np.exp(-linear(x, block + ".shared_expert_gate")))
            out += gate * gated(x, [f"{block}.shared_expert.{part}_proj" for part in ("gate", "up", "down")])
        return out

    def rotate(x, window):
        """[tokens, heads, head_dim]. The two halves of what rotates are the pairs' parts, or neighbours are; these
        become halves, as the order of a head's features is the same in queries and keys."""
        local = window and "rope_local_base_freq" in config
        own = {"rope_theta": config["rope_local_base_freq"]} if local else config
        if window and config["model_type"] == "olmo3":
            own = {"rope_theta": config["rope_theta"]}
        frequencies, factor = rope(own, 2 * half, context or count)
        angles = np.arange(count)[:, None, None] * frequencies
        cos, sin = (factor * np.cos(angles)).astype(dtype), (factor * np.sin(angles)).astype(dtype)
        a, b = x[..., :half], x[..., half : 2 * half]
        if glm or config["model_type"] in ("ernie4_5", "helium"):
            a, b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], axis=-1)

    def split(x, name, *parts):
        """Of a matrix that holds several: their results."""
        whole = linear(x, name)
        assert whole.shape[1] == sum(parts)
        return np.split(whole, np.cumsum(parts)[:-1], axis=1)

    distance = np.arange(count)[:, None] - np.arange(count)[None, :]
    x = weights["model.embed_tokens.weight"][tokens]
    if gemma:
        x = x * float(np.float32(np.sqrt(config["hidden_size"])))
    x = x * config.get("embedding_multiplier", 1.0)
    added = config.get("residual_multiplier", 1.0)
    attention_scale = config.get("attention_multiplier", 1 / float(np.sqrt(config.get("query_pre_attn_scalar", head_dim))))
    for layer, (window, rotates) in enumerate(zip(windows(config), rotating(config))):
        mask = np.where((distance < 0) | (distance >= (window or count)), -np.inf, 0.0).astype(dtype)
        prefix = f"model.layers.{layer}."
        h = pre_norm(x, prefix + "input_layernorm.weight")
        if prefix + "self_attn.qkv_proj.weight" in weights:
            q, k, v = split(h, prefix + "self_attn.qkv_proj", *(n * head_dim for n in (heads, kv_heads, kv_heads)))
        else:
            q, k, v = (linear(h, f"{prefix}self_attn.{part}_proj") for part in "qkv")
        q, k, v = q.reshape(count, heads, head_dim), *(m.reshape(count, kv_heads, head_dim) for m in (k, v))
        q = head_norm(q, prefix + "self_attn.q_norm.weight")
        k = head_norm(k, prefix + "self_attn.k_norm.weight")
        if rotates:
            q, k = rotate(q, window), rotate(k, window)
        out = np.empty((count, heads, head_dim), dtype)
        for head in range(heads):
            kv = head * kv_heads // heads
            scores = q[:, head] @ k[:, kv].T * attention_scale
            scores = (cap * np.tanh(scores / cap) if cap else scores) + mask
            scores = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head] = scores / scores.sum(axis=1, keepdims=True) @ v[:, kv]
        attended = linear(out.reshape(count, -1), prefix + "self_attn.o_proj")
        x = x + added * post_norm(attended, prefix + f"post_{'self_attn' if glm else 'attention'}_layernorm.weight")
        before = "pre_feedforward" if post_norms and not glm else "post_attention"
        h = pre_norm(x, prefix + before + "_layernorm.weight")
        if make_tiny_models.has_experts(config, layer):
            x = x + experts(h, layer)
            continue
        if prefix + "mlp.gate_up_proj.weight" in weights:
            gate, up = split(h, prefix + "mlp.gate_up_proj", *[config["intermediate_size"]] * 2)
        else:
            gate, up = linear(h, prefix + "mlp.gate_proj"), linear(h, prefix + "mlp.up_proj")
        fed = linear(activation(gate) * up, prefix + "mlp.down_proj")
        x = x + added * post_norm(fed, prefix + f"post_{'mlp' if glm else 'feedforward'}_layernorm.weight")
    head_name = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    result = norm(x, "model.norm.weight") @ weights[head_name].T / config.get("logits_scaling", 1.0)
    return logit_cap * np.tanh(result / logit_cap) if logit_cap else result
