"""Families of docs/models.md as vLLM's own classes and loaders read them, of an ordinary and of a nested checkpoint: every
weight as vLLM has it without the plugin. Needs vLLM and the package, and no GPU: a stand-in nests."""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace

try:
    import torch
    import vllm  # noqa: F401

    HAVE_VLLM = True
except ImportError:
    HAVE_VLLM = False

PROGRAM = Path(sys.executable).parent / "nestedfp"
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {},
    "ministral": {},  # this one, SmolLM3 and Helium by vLLM's backend for transformers
    "qwen2": {},
    "qwen3": {},
    "smollm3": {},
    "phi3": {},
    "gemma": {},  # vLLM refuses Gemma 2, Gemma 3 and GLM 4 0414 in FP16
    "granite": {},
    "glm": {},
    "seed_oss": {},
    "exaone4": {"sliding_window": 64},
    "ernie4_5": {},
    "helium": {},
    "olmo2": {},
    "olmo3": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 192},
    "qwen3_moe": EXPERTS,
}
# Also by vLLM's backend for transformers: its experts are given to their layer, and not to the parameters.
BY_TRANSFORMERS = ("qwen3_moe",)
# Whose head_dim does not follow from the hidden size.
HEAD_DIM = ("mistral", "ministral", "qwen3", "gemma", "glm", "seed_oss", "ernie4_5", "helium", "qwen3_moe")
# Of each checkpoint's second layer, with rows that no exponent nests.
DENSE = ("up_proj", "gate_up_proj", "o_proj", "k_proj", "experts.1.w1")


def make(folder: Path, family: str) -> None:
    """As transformers saves it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 512, "bos_token_id": 0,
             "eos_token_id": 1, "pad_token_id": 0, **({"head_dim": 64} if family in HEAD_DIM else {})}
    torch.manual_seed(len(family))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape, **FAMILIES[family])).half()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.dim() == 1:
                value.copy_(torch.randn(value.shape))
            elif "embed" not in name:
                value.copy_(torch.randn(value.shape) * 0.05)
            if "layers.0." in name and name.endswith("down_proj.weight"):  # a row with an exponent
                value[5] = (value[5].float() * 4096).round() / 4096
                value[5, 7] = 2.5
            if "layers.1." in name and name.removesuffix(".weight").endswith(DENSE):
                matrix = value[1] if value.dim() == 3 else value  # all experts may be one tensor
                matrix[3, :2] = torch.tensor([6.0, 2.0**-24])
    model.save_pretrained(folder)


def stand_ins() -> None:
    """In the place of a GPU: a layer's planes are its weight."""
    import vllm.platforms
    from nestedfp import _library
    from nestedfp.vllm import attention, experts, op, swiglu, versions
    from vllm.model_executor.models import registry
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()
    registry._run_in_subprocess = lambda inspect: inspect()  # 20 s for each class
    for name in ("gelu_and_mul", "gelu_tanh_and_mul"):  # which the wheel for GPUs has for these alone
        if not hasattr(torch.ops._C, name):
            torch.library.define(f"_C::{name}", "(Tensor! out, Tensor input) -> ()")

    def planes(weight):
        return SimpleNamespace(n=weight.shape[0], k=weight.shape[1], join=0, upper=weight, lower=torch.empty(0),
                               scale=torch.empty(0))

    def nest(weight, scaled=None):
        size = weight.float().abs()
        if bool(((size.amax(1) >= 6) & ((size > 0) & (size < 1e-6)).any(1)).any()):
            raise op.NotNested("a row has no exponent")
        return planes(weight.clone())

    def joined(upper, lower, scale):
        upper, lower = upper.contiguous().view(torch.uint8), lower.contiguous()
        weight = torch.empty(upper.shape, dtype=torch.float16)
        _library.check(_library.library().nfp_join(upper.data_ptr(), lower.data_ptr(), upper.numel(), weight.data_ptr()))
        return (weight.float() * (scale.float() * 256)).half()

    def stack(weight):
        return SimpleNamespace(bytes=weight, scale=torch.empty(0), dense={}, experts=len(weight))

    versions.check_gpu = op.self_test = attention.enable = lambda *_: None
    swiglu.may_join = lambda *_: False  # which would order rows
    op.device = lambda _: SimpleNamespace(forget=lambda: None)
    op.nest, op.pack = nest, lambda upper, lower, scale, *_: planes(joined(upper, lower, scale.reshape(-1, 1)))
    experts.nest = lambda weight, *_: stack(weight.clone())
    experts.pack = lambda upper, lower, scale, *_: stack(joined(upper, lower, scale))
    experts.Mixture = lambda *stacks: SimpleNamespace(stacks=stacks[:2])


def load(folder: Path, quantization: str | None = None, model_impl: str = "auto") -> tuple[dict, set]:
    """Every parameter, and the linear layers that are nested."""
    from vllm.config import DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    model = ModelConfig(model=str(folder), dtype="float16", quantization=quantization, enforce_eager=True,
                        skip_tokenizer_init=True, model_impl=model_impl)
    config = VllmConfig(model_config=model, device_config=DeviceConfig("cpu"))
    with set_current_vllm_config(config):
        made = get_model(vllm_config=config)
    return ({name: value.data for name, value in made.named_parameters()
             if not name.endswith(("weight_lower", "weight_scale"))},
            {name for name, layer in made.named_modules() if getattr(layer, "nestedfp_shape", None) is not None})


def compare(folder: Path) -> None:
    """In a process of its own."""
    for family in FAMILIES:  # before vLLM changes classes of transformers
        make(folder / family, family)
        subprocess.run([PROGRAM, "convert", folder / family, folder / f"{family}-nested", "--calibrate", "none"], check=True,
                       stdout=subprocess.DEVNULL)
    import nestedfp.vllm
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    stand_ins()
    nestedfp.vllm.register()
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        init_distributed_environment(1, 0, f"file://{folder}/group", 0, "gloo")
        initialize_model_parallel(1, 1)
    for family, by in (*((family, "auto") for family in FAMILIES),
                       *((family, "transformers") for family in BY_TRANSFORMERS)):
        rope = json.loads((folder / family / "config.json").read_text()).get("rope_parameters") or {}
        if family == "olmo3" and "full_attention" in rope:
            print("olmo3 left out: this vLLM does not read a rope for each kind of layer, as this transformers writes it")
            continue
        expected, none = load(folder / family, model_impl=by)
        assert not none
        for name, quantization in ((family, "nestedfp"), (f"{family}-nested", None)):
            found, nested = load(folder / name, quantization, by)
            assert found.keys() == expected.keys(), (name, found.keys() ^ expected.keys())
            differ = [key for key, value in expected.items() if not torch.equal(found[key].float(), value.float())]
            assert not differ, (name, differ)
            assert [layer for layer in nested if layer.endswith("o_proj")] == ["model.layers.0.self_attn.o_proj"], (name, nested)
            print(name if by == "auto" else f"{name}-by-{by}", len(nested), flush=True)


@unittest.skipUnless(HAVE_VLLM and PROGRAM.exists(), "needs vLLM and the package")
class Families(unittest.TestCase):
    def test_every_weight_is_vllm_s(self):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([sys.executable, __file__, folder], capture_output=True, text=True,
                                  env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"})
        self.assertEqual(done.returncode, 0, done.stdout[-3000:] + done.stderr[-3000:])
        lines = [line.split(" ") for line in done.stdout.splitlines() if line.split(" ")[0].split("-")[0] in FAMILIES]
        left_out = {line[0] for line in lines if line[1:3] == ["left", "out:"]}
        self.assertLessEqual(left_out, {"olmo3"})
        want = {name for family in FAMILIES if family not in left_out for name in (family, f"{family}-nested")}
        want |= {f"{family}{kind}-by-transformers" for family in BY_TRANSFORMERS for kind in ("", "-nested")}
        self.assertEqual({line[0] for line in lines} - left_out, want, done.stdout)
        for line in lines:
            if line[0] in left_out:
                with self.subTest(line[0]):
                    self.skipTest(" ".join(line))


if __name__ == "__main__":
    if len(sys.argv) == 2 and Path(sys.argv[1]).is_dir():
        compare(Path(sys.argv[1]))
    else:
        unittest.main(verbosity=1)
