"""Which layers of vLLM's attention rotates, what it is told, and what becomes of that when weights are read again, over
vLLM's own modules on the CPU. Needs vLLM and no GPU. tests/vllm/test_attention.py has the numbers."""

import unittest
from contextlib import ExitStack
from types import SimpleNamespace
from unittest.mock import patch

try:
    import torch
    import vllm  # noqa: F401

    HAVE_VLLM = True
except ImportError:
    HAVE_VLLM = False

HEADS, KV_HEADS, SIZE, POSITIONS = 4, 2, 32, 48
ROW = (HEADS + 2 * KV_HEADS) * SIZE


@unittest.skipUnless(HAVE_VLLM, "needs torch and vLLM")
class Join(unittest.TestCase):
    def setUp(self):
        from nestedfp.vllm import attention, rotary
        from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
        from vllm.model_executor.models import llama, mistral, qwen2, qwen3, qwen3_moe

        self.attention, self.rotary = attention, rotary
        self.kinds = {"llama": llama.LlamaAttention, "mistral": mistral.MistralAttention, "qwen2": qwen2.Qwen2Attention,
                      "qwen3": qwen3.Qwen3Attention, "qwen3_moe": qwen3_moe.Qwen3MoeAttention}
        stack = ExitStack()
        self.addCleanup(stack.close)
        stack.enter_context(set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))))
        self.config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1), speculative_config=None)

    def embedding(self, **other):
        from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

        shape = {"head_size": SIZE, "rotary_dim": SIZE, "max_position_embeddings": POSITIONS, "base": 10000.0,
                 "is_neox_style": True, "dtype": torch.float16, **other}
        return RotaryEmbedding(**shape)

    def layer(self, kind, embedding=None, **norms):
        """vLLM's attention layer, without what needs a group of GPUs: q_norm, k_norm or both may be other than usual."""
        from vllm.model_executor.layers.layernorm import RMSNorm

        made = self.kinds[kind].__new__(self.kinds[kind])
        torch.nn.Module.__init__(made)
        made.head_dim, made.q_size, made.kv_size, made.qk_norm = SIZE, HEADS * SIZE, KV_HEADS * SIZE, False
        if kind != "qwen2":
            del made.qk_norm
        made.num_heads, made.num_kv_heads, made.do_llama_4_scaling = HEADS, KV_HEADS, False
        made.rotary_emb = embedding or self.embedding()
        if kind.startswith("qwen3") or norms:
            for name, seed in (("q_norm", 1), ("k_norm", 2)):
                norm = norms.get(name) or RMSNorm(SIZE, eps=1e-5, dtype=torch.float16)
                generator = torch.Generator().manual_seed(seed)
                norm.weight.data.copy_(1 + 0.1 * torch.randn(norm.weight.shape, generator=generator))
                setattr(made, name, norm)
        if norms and kind == "qwen2":
            made.qk_norm = True
        impl = self.attention.Impl.__new__(self.attention.Impl)
        impl.head_size, impl.num_heads, impl.num_kv_heads, impl.nestedfp_fits = SIZE, HEADS, KV_HEADS, True
        impl.nestedfp_rotation = None
        made.attn = Attention(impl, self.attention.Backend)
        made.qkv_proj, made.o_proj = Product(), Product()
        return made

    def join(self, *layers, model=None, **config):
        config = SimpleNamespace(**{**vars(self.config), **config})
        return self.rotary.join(torch.nn.ModuleList(layers), config, model)

    def test_layers_of_the_known_forms(self):
        for kind in self.kinds:
            with self.subTest(kind):
                layer = self.layer(kind)
                table = layer.rotary_emb.cos_sin_cache.float()
                weights = [layer.q_norm.weight.float(), layer.k_norm.weight.float()] if kind.startswith("qwen3") else None
                self.assertEqual(self.join(layer), 1)
                rotation = layer.attn.impl.nestedfp_rotation
                self.assertTrue(torch.equal(rotation.cos_sin, table))
                self.assertEqual(rotation.cos_sin.dtype, torch.float32)
                self.assertIs(layer.attn.attn_backend, self.attention.AppendingBackend)
                if weights is None:
                    self.assertEqual((rotation.q_norm, rotation.k_norm, rotation.epsilon), (None, None, 0))
                else:
                    self.assertTrue(torch.equal(rotation.q_norm, weights[0]) and torch.equal(rotation.k_norm, weights[1]))
                    self.assertEqual(rotation.epsilon, 1e-5)
                self.assertEqual(self.join(layer), 0)  # once
        layer = self.layer("qwen2", q_norm=None, k_norm=None)
        self.assertEqual(self.join(layer), 1)
        self.assertIsNotNone(layer.attn.impl.nestedfp_rotation.k_norm)

    def test_other_layers_are_as_they_were(self):
        from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
        from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding

        class Mine(self.kinds["llama"]):
            pass

        sectioned = MRotaryEmbedding(SIZE, SIZE, POSITIONS, 10000.0, True, torch.float16, [4, 6, 6])
        self.kinds["mine"] = Mine
        made = [self.layer("mine"), self.layer("llama", self.embedding(is_neox_style=False)),
                self.layer("qwen2", self.embedding(rotary_dim=SIZE // 2)), self.layer("qwen2", sectioned),
                self.layer("mistral"), self.layer("llama"), self.layer("llama"),
                self.layer("qwen3", q_norm=GemmaRMSNorm(SIZE), k_norm=GemmaRMSNorm(SIZE)),
                self.layer("qwen3", k_norm=RMSNorm(SIZE, eps=1e-6)),
                self.layer("qwen3_moe", q_norm=RMSNorm(SIZE * HEADS, eps=1e-5)),
                self.layer("qwen3", q_norm=RMSNorm(SIZE, eps=1e-5, var_hidden_size=SIZE // 2))]
        made[4].do_llama_4_scaling = True
        made[5].attn.impl.nestedfp_fits = False
        made[6].attn.attn_backend = object  # ours, but of another form: encoders', say
        before = [(layer.rotary_emb, layer.attn.attn_backend) for layer in made]
        self.assertEqual(self.join(*made), 0)
        self.assertEqual([(layer.rotary_emb, layer.attn.attn_backend) for layer in made], before)
        for layer in made:
            self.assertIsNone(layer.attn.impl.nestedfp_rotation)
            self.assertNotEqual(getattr(getattr(layer, "q_norm", None), "_forward_method", None), self.rotary._as_it_is)

    def test_draft_models_and_data_parallel_mixtures_do_not(self):
        drafts = SimpleNamespace(method="eagle")
        self.assertEqual(self.join(self.layer("llama"), model=SimpleNamespace(runner_type="draft"),
                                   speculative_config=drafts), 0)
        self.assertEqual(self.join(self.layer("llama"), parallel_config=SimpleNamespace(data_parallel_size=2)), 0)
        self.assertEqual(self.join(self.layer("llama"), model=SimpleNamespace(runner_type="generate"),
                                   speculative_config=drafts), 1)

    def test_loaders_tell_draft_models(self):
        """By vLLM's own loader, around what it would read."""
        from nestedfp.vllm import loading, op
        from vllm.config import get_current_vllm_config
        from vllm.model_executor.model_loader import base_loader
        from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

        loading.install()
        config, counts = get_current_vllm_config(), []
        loader = DummyModelLoader(config.load_config)
        for runner in ("generate", "draft", "pooling"):
            model = torch.nn.ModuleList([self.layer("llama")])
            with patch.object(base_loader, "initialize_model", lambda model=model, **_: model), \
                    patch.object(base_loader, "process_weights_after_loading"), \
                    patch.object(DummyModelLoader, "load_weights"), patch.dict(op._devices, {0: None}), \
                    patch.object(loading, "_follow_worker"):
                loader.load_model(vllm_config=config, model_config=SimpleNamespace(dtype=torch.float16, runner_type=runner))
            counts.append(len(loading.form_of(model)))
        self.assertEqual(counts, [1, 0, 1])

    def test_attention_gets_rows_as_their_product_left_them(self):
        """Compiled too, as one graph."""
        for kind in self.kinds:
            layer = self.layer(kind)
            self.join(layer)
            rows = torch.randn(7, ROW).half()
            for forward in (layer.forward, torch.compile(layer.forward, backend="eager", fullgraph=True)):
                with self.subTest(kind):
                    layer.attn.seen = None
                    forward(torch.arange(7), rows)
                    self.assertEqual([part.data_ptr() - rows.data_ptr() for part in layer.attn.seen],
                                     [0, 2 * HEADS * SIZE, 2 * (HEADS + KV_HEADS) * SIZE])
                    self.assertEqual([part.stride(0) for part in layer.attn.seen], [ROW] * 3)

    def test_weights_that_are_read_again(self):
        """Tables stay, and stay buffers that vLLM saves when it sleeps; norms' new weights are where the old ones were."""
        from vllm.model_executor.model_loader.reload import layerwise, record_metadata_for_reloading

        shared = self.embedding()
        model = torch.nn.ModuleList([self.layer("qwen3", shared), self.layer("qwen3", shared), self.layer("llama")])
        record_metadata_for_reloading(model)
        self.assertEqual(self.rotary.join(model, self.config), 3)
        rotations = [layer.attn.impl.nestedfp_rotation for layer in model]
        before = [r.cos_sin.data_ptr() for r in rotations]
        self.assertEqual(len(set(before)), 2)
        addresses = [r.q_norm.data_ptr() for r in rotations[:2]]
        for value in (2.0, 3.0):
            layerwise.initialize_layerwise_reload(model)
            for layer in model[:2]:
                for norm in (layer.q_norm, layer.k_norm):
                    norm.weight.weight_loader(norm.weight, torch.full((SIZE,), value).half())
            layerwise.finalize_layerwise_processing(model, SimpleNamespace(dtype=torch.float16))
            self.rotary.refresh()
            saved = [buffer.data_ptr() for name, buffer in model.named_buffers() if name.endswith("cos_sin")]
            self.assertEqual(sorted(saved), sorted(set(before)))
            self.assertEqual([r.q_norm.data_ptr() for r in rotations[:2]], addresses)
            for rotation in rotations[:2]:
                self.assertEqual(rotation.q_norm.unique().tolist() + rotation.k_norm.unique().tolist(), [value] * 2)

    def test_a_compiled_graph_s_key_has_the_layers_that_rotate(self):
        from nestedfp.vllm import loading

        shared = self.embedding()
        model = torch.nn.ModuleList([self.layer("llama", shared), self.layer("llama", shared)])
        self.assertEqual(loading.form_of(model), [])
        model[1].attn.impl.nestedfp_fits = False
        self.rotary.join(model, self.config)
        self.assertEqual(loading.form_of(model), [("0", "attention rotates")])
        model[1].attn.impl.nestedfp_fits = True
        self.rotary.join(model, self.config)
        self.assertEqual(len(loading.form_of(model)), 2)


if HAVE_VLLM:
    class Attention(torch.nn.Module):
        def __init__(self, impl, backend):
            super().__init__()
            self.impl, self.attn_backend, self.seen = impl, backend, None

        def forward(self, *parts):
            self.seen = parts
            return parts[0]

    class Product(torch.nn.Module):
        def forward(self, x):
            return x, None


if __name__ == "__main__":
    unittest.main(verbosity=1)
