#!/usr/bin/env python3
"""A model as a GGUF file against the same model as a Hugging Face directory: test_gguf.py PROGRAM TINY_MODELS

The tiny models are written as llama.cpp's converter would write them: names, metadata, the order of the rows of q and k.
"""

import json
import os
import re
import shutil
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "models"))

try:
    import gguf
    import numpy as np
except ImportError as missing:
    print(f"skipped: {missing.name} is not installed (scripts/test installs it)")
    sys.exit(77)

import reference
import safetensors_file
import tiny_tokenizer
from program import TINY, Scratch, failure, main, run, run_json

PRE = {"llama-tied": "smollm", "llama-headdim": "gpt-2", "llama-yarn": "smollm", "llama-bias": "smollm",
       "llama3-rope": "llama-bpe", "mistral": "gpt-2", "mistral-full": "gpt-2", "qwen2": "qwen2", "qwen3": "qwen2",
       "qwen3-yarn": "qwen2", "gemma2": "gpt-2", "gemma3": "gpt-2", "phi3": "gpt-2", "phi3-long": "gpt-2",
       "phi4-mini": "gpt-2", "gemma3-pattern": "gpt-2", "mixtral-full": "gpt-2",
       "smollm3": "llama-bpe", "mixtral": "gpt-2", "qwen2-moe": "qwen2", "qwen3-moe": "qwen2", "olmoe": "gpt-2",
       "gemma": "gpt-2", "olmo2": "gpt-2", "olmo2-tied": "gpt-2", "olmo3": "llama-bpe", "granite": "refact", "granite-bias": "refact",
       "seed-oss": "gpt-2", "seed-oss-bias": "gpt-2", "exaone4": "exaone4", "exaone4-full": "exaone4",
       "glm4": "gpt-2", "glm4-tied": "gpt-2", "ernie4-5": "gpt-2", "ernie4-5-bias": "gpt-2"}
# By model_type, or of one model. Mistral's text model of a multimodal checkpoint is "mistral3".
ARCHITECTURES = {"gemma3_text": "gemma3", "mistral": "llama", "mistral-full": "mistral3", "olmo3": "olmo2", "mixtral": "llama",
                 "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
# Divisors of frequencies are all that files have of Llama 3's scaling; which of its releases have these is looked up.
LLAMA3_RELEASED = {"original_max_position_embeddings": 8192}
# Dense layers of models with experts, for which gguf has no names.
DENSE = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
EXPERT = re.compile(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
PARTS = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def permuted(rows, heads):
    """The order that llama.cpp's converter gives the rows of a Llama's q and k, which it rotates in neighbouring pairs."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def add_rotation(writer, config):
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(scaling["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        if config["model_type"] == "olmo3":  # the configuration's attention_factor, which published ones have
            writer.add_rope_scaling_attn_factors(0.1 * np.log(scaling["factor"]) + 1)
    if kind == "llama3":
        dim = config["head_dim"]
        released = {**config, "rope_scaling": {**scaling, **LLAMA3_RELEASED}}
        scaled, plain = (reference.rope(c, dim, 1)[0] for c in (released, {**config, "rope_scaling": None}))
        writer.add_tensor("rope_freqs.weight", (plain / scaled).astype(np.float32))
    if config["model_type"] == "glm4":
        writer.add_rope_dimension_count(int(config["partial_rotary_factor"] * config["head_dim"]))
    if config["model_type"] == "phi3":
        heads, original = config["num_attention_heads"], config["original_max_position_embeddings"]
        writer.add_rope_dimension_count(int(config["partial_rotary_factor"] * config["hidden_size"]) // heads)
        writer.add_rope_scaling_orig_ctx_len(original)
        scale = config["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(np.sqrt(1 + np.log(scale) / np.log(original)) if scale > 1 else 1.0)
        writer.add_tensor("rope_factors_long.weight", np.array(scaling["long_factor"], np.float32))
        writer.add_tensor("rope_factors_short.weight", np.array(scaling["short_factor"], np.float32))


def add_family(writer, kind, config):
    if kind == "gemma3":
        writer.add_uint32("gemma3.attention.sliding_window_pattern", config.get("sliding_window_pattern", 3))
        writer.add_float32("gemma3.rope.freq_base_swa", config["rope_local_base_freq"])
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if kind == "granite":
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if kind in ("gemma2", "gemma3", "phi3") or config["model_type"] == "olmo3":
        writer.add_sliding_window(config["sliding_window"] or 0)
    if kind == "exaone4" and config["sliding_window"]:
        writer.add_sliding_window(config["sliding_window"])
    if config["model_type"] == "olmo3" or kind == "exaone4" and config["sliding_window"]:
        slides = [window is not None for window in reference.windows(config)]
        writer.add_array(f"{kind}.attention.sliding_window_pattern", slides)
    experts = config.get("num_local_experts", config.get("num_experts"))
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def gguf_tensors(model, kind):
    """(name, values) as the converter has them: rows in its order, the experts of a layer as one tensor."""
    config = model.config
    # The package may be older than an architecture whose names are Llama's, or OLMo 2's.
    like = gguf.MODEL_ARCH.OLMO2 if kind == "exaone4" else gguf.MODEL_ARCH.LLAMA
    architecture = getattr(gguf.MODEL_ARCH, kind.upper(), like)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    stacks = {}
    for name, values in model.weights.items():
        if expert := EXPERT.fullmatch(name):
            stacks.setdefault(f"blk.{expert[1]}.ffn_{PARTS[expert[3]]}_exps.weight", {})[int(expert[2])] = values
            continue
        if kind in ("llama", "mistral3", "smollm3", "granite") and "q_proj" in name:
            values = permuted(values, heads)
        if kind in ("llama", "mistral3", "smollm3", "granite") and "k_proj" in name:
            values = permuted(values, kv_heads)
        if kind.startswith("gemma") and "norm" in name:
            values = values + np.float32(1)
        module, _, suffix = name.rpartition(".")
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if kind == "seed_oss":
            target = target.replace("ffn_norm", "post_attention_norm")
        if target is None:
            layer = module.split(".")[2]
            target = f"blk.{layer}.{DENSE[module.split('.', 3)[3]]}.{suffix}"
        yield target, values.squeeze()
    for target, stack in stacks.items():
        yield target, np.stack([stack[i] for i in range(len(stack))])


def write_gguf(path, folder, **split):
    model = reference.Model(folder)
    config = model.config
    kind = ARCHITECTURES.get(os.path.basename(folder), ARCHITECTURES.get(config["model_type"], config["model_type"]))
    writer = gguf.GGUFWriter(path, kind, **split)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    add_rotation(writer, config)
    add_family(writer, kind, config)
    with open(os.path.join(folder, "tokenizer.json"), encoding="utf-8") as file:
        tokenizer = json.load(file)
    added = {token["content"] for token in tokenizer["added_tokens"]}
    vocab = tokenizer["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE[os.path.basename(folder)])
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in added else 1 for token in tokens])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    for target, values in gguf_tensors(model, kind):
        if values.ndim == 1 or "ffn_gate_inp" in target:
            writer.add_tensor(target, values.astype(np.float32))
        elif config["torch_dtype"] == "bfloat16":
            bits = safetensors_file.f32_to_bf16(values)
            writer.add_tensor(target, bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(target, values.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Gguf(Scratch):
    def answers(self, model):
        """What the model computes, in both precisions: log-probabilities of a text, and a greedy continuation."""
        with open(self.path("text"), "w", encoding="utf-8") as file:
            file.write(tiny_tokenizer.TEXT)
        every = []
        for precision in ("fp16", "fp8"):
            # Within the windows of the tiny models: GGUF files of these families have none.
            scored = run_json("perplexity", model, "--file", self.path("text"), "--ctx", "24", "--precision", precision)
            text = run_json("generate", model, "-p", "The engine ran", "-n", "6", "--precision", precision, "--ignore-eos")
            self.assertLess(text["usage"]["prompt_tokens"] + 6, 28)
            every.append((scored["scored_tokens"], scored["perplexity"], scored["error"], text["tokens"]))
        return every

    def as_files_have_it(self, folder):
        """The model, or a copy of it with what llama.cpp takes for granted and files do not say: Gemma scales q k by a
        head's size, Gemma 3 has no soft caps, every fourth layer of SmolLM3 does not rotate, Llama 3 has its releases'
        original context."""
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        scaling = config["rope_scaling"] or {}
        changes = {"gemma2": {"query_pre_attn_scalar": config.get("head_dim")},
                   "gemma3_text": {"query_pre_attn_scalar": config.get("head_dim"), "final_logit_softcapping": None},
                   "smollm3": {"no_rope_layers": None, "no_rope_layer_interval": 4}}.get(config["model_type"])
        if scaling.get("rope_type") == "llama3":
            changes = {"rope_scaling": {**scaling, **LLAMA3_RELEASED}}
        if changes is None:
            return folder
        copy = shutil.copytree(folder, self.path("granted-" + os.path.basename(folder)))
        with open(os.path.join(copy, "config.json"), "w", encoding="utf-8") as file:
            json.dump({**config, **changes}, file)
        return copy

    def test_it_is_the_same_model(self):
        for name in PRE:
            with self.subTest(name):
                folder, file = os.path.join(TINY, name), self.path(name + ".gguf")
                write_gguf(file, folder)
                expected = self.answers(self.as_files_have_it(folder))
                self.assertNotEqual(expected[0], expected[1])
                self.assertEqual(self.answers(file), expected)

    def test_several_files_are_one_model(self):
        for name in ("llama-headdim", "mixtral"):
            folder = os.path.join(TINY, name)
            write_gguf(self.path(name + ".gguf"), folder, split_max_tensors=9)
            parts = sorted(part for part in os.listdir(self.dir) if part.startswith(name + "-0"))
            self.assertGreater(len(parts), 2)
            self.assertEqual(self.answers(self.path(parts[0])), self.answers(folder), name)
            self.assertIn(parts[0].split("-0")[-1], failure("inspect", self.path(parts[1])))
            os.remove(self.path(parts[-1]))
            self.assertIn(parts[-1], failure("inspect", self.path(parts[0])))

    def test_a_nested_checkpoint_of_it_is_too(self):
        for name in ("qwen3", "mixtral"):
            file, nested = self.path(name + ".gguf"), self.path(name)
            write_gguf(file, os.path.join(TINY, name))
            run("convert", file, nested, "--calibrate", "none")
            self.assertEqual(self.answers(nested), self.answers(file))

    def test_a_tensor_that_the_family_needs(self):
        file, other = self.path("qwen2.gguf"), self.path("other.gguf")
        write_gguf(file, os.path.join(TINY, "qwen2"))
        with open(file, "rb") as source, open(other, "wb") as target:
            # The same length, so that the file stays whole.
            target.write(source.read().replace(b"blk.1.attn_k.bias", b"blk.1.attn_k.bixs"))
        self.assertIn("model.layers.1.self_attn.k_proj.bias", failure("generate", other, "-p", "x"))


if __name__ == "__main__":
    main()
