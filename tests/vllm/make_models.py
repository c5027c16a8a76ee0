"""make_models.py FOLDER: tiny Llama, Qwen2, Qwen3, Mistral, Qwen3-MoE, Qwen2-MoE and Mixtral models with random weights, as transformers would save them, and
a LoRA adapter for the first, for the plugin's tests. Head size 64 and features that two GPUs can share. Needs numpy only."""

import json
import struct
import sys
from pathlib import Path

import numpy as np

HIDDEN, HEADS, KV_HEADS, HEAD, FFN, LAYERS, VOCAB = 128, 4, 2, 64, 384, 3, 512
EXPERTS, TOP, EXPERT_FFN = 8, 2, 96

FAMILIES = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": EXPERTS,
                  "num_experts_per_tok": TOP, "moe_intermediate_size": EXPERT_FFN, "norm_topk_prob": True,
                  "decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False},
    "qwen2_moe": {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "num_experts": EXPERTS,
                  "num_experts_per_tok": TOP, "moe_intermediate_size": EXPERT_FFN, "norm_topk_prob": False,
                  "shared_expert_intermediate_size": 2 * EXPERT_FFN, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": EXPERTS,
                "num_experts_per_tok": TOP, "intermediate_size": EXPERT_FFN, "sliding_window": None},
}


def mlp_shapes(family: str) -> dict[str, tuple[int, int]]:
    """Of one layer."""
    if family not in ("qwen3_moe", "qwen2_moe", "mixtral"):
        return {"mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN), "mlp.down_proj": (HIDDEN, FFN)}
    stem = "block_sparse_moe" if family == "mixtral" else "mlp"
    gate, up, down = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    out = {f"{stem}.gate": (EXPERTS, HIDDEN)}
    for e in range(EXPERTS):
        out.update({f"{stem}.experts.{e}.{gate}": (EXPERT_FFN, HIDDEN), f"{stem}.experts.{e}.{up}": (EXPERT_FFN, HIDDEN),
                    f"{stem}.experts.{e}.{down}": (HIDDEN, EXPERT_FFN)})
    if family == "qwen2_moe":
        out.update({"mlp.shared_expert.gate_proj": (2 * EXPERT_FFN, HIDDEN),
                    "mlp.shared_expert.up_proj": (2 * EXPERT_FFN, HIDDEN),
                    "mlp.shared_expert.down_proj": (HIDDEN, 2 * EXPERT_FFN), "mlp.shared_expert_gate": (1, HIDDEN)})
    return out


def tensors(family: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    def draw(*shape: int, sigma: float = 0.06) -> np.ndarray:
        return (rng.standard_normal(shape) * sigma).astype(np.float16)

    out = {"model.embed_tokens.weight": draw(VOCAB, HIDDEN, sigma=1.0), "lm_head.weight": draw(VOCAB, HIDDEN, sigma=0.15),
           "model.norm.weight": np.ones(HIDDEN, np.float16)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        shapes = {"self_attn.q_proj": (HEADS * HEAD, HIDDEN), "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
                  "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
                  **mlp_shapes(family)}
        for name, shape in shapes.items():
            # Routers that are sure of their choice: rounding of what they see is not to change it.
            out[f"{layer}{name}.weight"] = draw(*shape, sigma=1.0 if name.endswith(".gate") else 0.06)
            if family in ("qwen2", "qwen2_moe") and name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
                out[f"{layer}{name}.bias"] = draw(shape[0], sigma=0.2)
        for name in ("input_layernorm", "post_attention_layernorm"):
            out[f"{layer}{name}.weight"] = (1 + rng.standard_normal(HIDDEN) * 0.1).astype(np.float16)
        if family in ("qwen3", "qwen3_moe"):
            for name in ("self_attn.q_norm", "self_attn.k_norm"):
                out[f"{layer}{name}.weight"] = (1 + rng.standard_normal(HEAD) * 0.2).astype(np.float16)
    # Weights beyond 1.75, which take row exponents (the others of such a row have bits to spare).
    down = next(name for name in out if "layers.0." in name and name.endswith(("mlp.down_proj.weight", "0.w2.weight",
                                                                               "0.down_proj.weight")))
    for name, rows, column, value in ((down, slice(5, 6), 7, 2.5),
                                      ("model.layers.1.self_attn.q_proj.weight", slice(0, None, 17), 3, -3.0)):
        out[name][rows] = np.round(out[name][rows].astype(np.float32) * 4096) / 4096
        out[name][rows, column] = value
    if family == "mistral":  # a matrix that no exponents nest: its group stays dense
        out["model.layers.1.mlp.up_proj.weight"][3, :2] = [6.0, 2.0**-24]
    return out


def save(path: Path, values: dict[str, np.ndarray]) -> None:
    """As one safetensors file."""
    data, header, offset = [], {}, 0
    for name, value in values.items():
        header[name] = {"dtype": "F16", "shape": list(value.shape), "data_offsets": [offset, offset + value.nbytes]}
        data.append(value.tobytes())
        offset += value.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(data))


def write_adapter(path: Path) -> None:
    """A LoRA adapter for these shapes, as peft would save it. It changes q/k/v, gate/up and down: both kinds of fused
    layers and one that tensor parallelism cuts along its input."""
    path.mkdir(parents=True, exist_ok=True)
    rank, rng = 8, np.random.default_rng(11)
    shapes = {"self_attn.q_proj": (HEADS * HEAD, HIDDEN), "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
              "mlp.gate_proj": (FFN, HIDDEN), "mlp.down_proj": (HIDDEN, FFN)}
    values = {}
    for i in range(LAYERS):
        for name, (rows, columns) in shapes.items():
            stem = f"base_model.model.model.layers.{i}.{name}"
            values[f"{stem}.lora_A.weight"] = (rng.standard_normal((rank, columns)) * 0.1).astype(np.float16)
            values[f"{stem}.lora_B.weight"] = (rng.standard_normal((rows, rank)) * 0.1).astype(np.float16)
    save(path / "adapter_model.safetensors", values)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 16, "lora_dropout": 0.0, "bias": "none",
              "target_modules": [name.split(".")[1] for name in shapes], "base_model_name_or_path": "llama"}
    (path / "adapter_config.json").write_text(json.dumps(config, indent=1))


def write(path: Path, family: str, seed: int | None = None, layers: int = LAYERS) -> None:
    """`layers`: only the first of them."""
    path.mkdir(parents=True, exist_ok=True)
    config = {"hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": layers, "num_attention_heads": HEADS,
              "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "vocab_size": VOCAB, "rms_norm_eps": 1e-5,
              "max_position_embeddings": 512, "rope_theta": 10000.0, "hidden_act": "silu", "torch_dtype": "float16",
              "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, **FAMILIES[family]}
    (path / "config.json").write_text(json.dumps(config, indent=1))
    values = tensors(family, np.random.default_rng(len(family) if seed is None else seed))
    beyond = tuple(f"model.layers.{i}." for i in range(layers, LAYERS))
    save(path / "model.safetensors", {name: value for name, value in values.items() if not name.startswith(beyond)})


def write_tokenizer(path: Path) -> None:
    """A word for each token: "w0 w1 ...". For tests over HTTP; the others pass token ids."""
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
                 "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
                 "model": {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(VOCAB)}, "unk_token": "w0"}}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "w0", "eos_token": "w1", "unk_token": "w0"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def main() -> None:
    for family in FAMILIES:
        write(Path(sys.argv[1]) / family, family)
    for family in ("qwen2", "qwen3_moe"):  # other weights of the same shapes
        write(Path(sys.argv[1]) / f"{family}-other", family, seed=99)
    write(Path(sys.argv[1]) / "llama-draft", "llama", layers=LAYERS - 1)
    write_adapter(Path(sys.argv[1]) / "llama-lora")
    write_tokenizer(Path(sys.argv[1]) / "llama")


if __name__ == "__main__":
    main()
