#!/usr/bin/env python3
"""A model as a GGUF file against the same model as a Hugging Face directory: test_gguf.py PROGRAM TINY_MODELS

The tiny models are written as llama.cpp's converter would write them: names, metadata, the order of the rows of q and k.
"""

import json
import os
import shutil
import sys
import unittest

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

PRE = {"llama-tied": "smollm", "llama-headdim": "gpt-2", "qwen2": "qwen2", "qwen3": "qwen2", "gemma3": "gpt-2"}


def permuted(rows, heads):
    """The order that llama.cpp's converter gives the rows of a Llama's q and k, which it rotates in neighbouring pairs."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path, folder):
    model = reference.Model(folder)
    config = model.config
    kind = {"gemma3_text": "gemma3"}.get(config["model_type"], config["model_type"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], config["num_hidden_layers"])
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if kind == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 3)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config["rope_scaling"]["factor"])
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
    for name, values in model.weights.items():
        if kind == "llama" and "q_proj" in name:
            values = permuted(values, heads)
        if kind == "llama" and "k_proj" in name:
            values = permuted(values, kv_heads)
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if kind == "gemma3" and "norm" in name:
            values = values + np.float32(1)
        if values.ndim == 1:
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

    def with_the_scale_of_a_head(self, folder):
        """A copy of a Gemma 3 that scales q k by a head's size, as llama.cpp takes for granted: its files do not say."""
        copy = shutil.copytree(folder, self.path("scaled"))
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        with open(os.path.join(copy, "config.json"), "w", encoding="utf-8") as file:
            json.dump({**config, "query_pre_attn_scalar": config["head_dim"]}, file)
        return copy

    def test_it_is_the_same_model(self):
        for name in PRE:
            folder, file = os.path.join(TINY, name), self.path(name + ".gguf")
            write_gguf(file, folder)
            if name == "gemma3":
                folder = self.with_the_scale_of_a_head(folder)
            expected = self.answers(folder)
            self.assertNotEqual(expected[0], expected[1])
            self.assertEqual(self.answers(file), expected, name)

    def test_a_nested_checkpoint_of_it_is_too(self):
        file, nested = self.path("qwen3.gguf"), self.path("nested")
        write_gguf(file, os.path.join(TINY, "qwen3"))
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
