"""What the plugin does around vLLM's loading of weights, the first time and later ones, over vLLM's own layers and its
own layerwise loading, on the CPU. Needs vLLM and no GPU: a stand-in nests. tests/vllm/test_serving.py has the GPU's part.
"""

import sys
import unittest
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from nestedfp import _library

try:
    import torch
    import vllm  # noqa: F401

    HAVE_VLLM = True
except ImportError:
    HAVE_VLLM = False

HERE = Path(__file__).parent
ROWS, COLUMNS = 32, 64


def nested(weight, scaled=None):
    """In place of op.nest(): the two bytes of each number; a row's exponent is 1 where its first number is 2 or more.
    A matrix with a 5 does not nest."""
    from nestedfp.vllm import op

    if bool((weight == 5).any()):
        raise op.NotNested("it holds a 5")
    made = SimpleNamespace(n=weight.shape[0], k=weight.shape[1], join=0)
    pairs = weight.contiguous().view(torch.uint8).view(-1, 2)
    made.upper, made.lower = pairs[:, 1].clone(), pairs[:, 0].clone()
    made.scale = op.scale_of_form(torch.where(weight[:, 0].float() >= 2, 2.0, 1.0), scaled)
    return made


@unittest.skipUnless(HAVE_VLLM, "needs torch and vLLM")
class Loading(unittest.TestCase):
    def setUp(self):
        from nestedfp.vllm import loading, op, quantization
        from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
        from vllm.model_executor import parameter
        from vllm.model_executor.layers import linear

        self.loading, self.op, self.linear = loading, op, linear
        op.register()
        loading.install()
        self.config = quantization.NestedFPConfig()
        self.config.prepared = True
        self.forgotten, self.refreshed = [], []
        stack = ExitStack()
        self.addCleanup(stack.close)
        for module in (linear, parameter):
            for name, value in (("rank", 0), ("world_size", 1)):
                stack.enter_context(patch.object(module, f"get_tensor_model_parallel_{name}", return_value=value))
        stack.enter_context(patch.object(op, "nest", nested))
        stack.enter_context(patch.object(op, "self_test", lambda *_: None))
        stack.enter_context(patch.object(op, "device", lambda index: SimpleNamespace(
            forget=lambda: self.forgotten.append(index))))
        stack.enter_context(patch.object(op, "refresh", self.refreshed.append))
        stack.enter_context(set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))))

    def model(self, **layers):
        """Of linear layers of these names; a number of parts makes one of several matrices."""
        from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

        made = torch.nn.Module()
        for name, parts in layers.items():
            common = {"bias": parts is None, "params_dtype": torch.float16, "quant_config": self.config, "prefix": name}
            setattr(made, name, self.linear.ReplicatedLinear(COLUMNS, ROWS, **common) if parts is None else
                    self.linear.MergedColumnParallelLinear(COLUMNS, [ROWS] * parts, **common))
        record_metadata_for_reloading(made)
        return made

    def weight(self, seed, exponents=False):
        weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed)).clamp(-1, 1).half()
        if exponents:
            weight[3, 0] = 3
        return weight

    def read(self, model, again=False, **weights):
        """As vLLM does: weights first, then whatever is not processed yet."""
        from vllm.model_executor.model_loader.reload import layerwise

        if again:
            layerwise.initialize_layerwise_reload(model)
        for name, value in weights.items():
            layer, _, part = name.partition("_part")
            layer = getattr(model, layer)
            if part:
                layer.weight.weight_loader(layer.weight, value, int(part))
                continue
            layer.weight.weight_loader(layer.weight, value)
            if layer.bias is not None:
                layer.bias.weight_loader(layer.bias, value[:, 1].clone())
        layerwise.finalize_layerwise_processing(model, SimpleNamespace(dtype=torch.float16))
        for layer in model.children():
            layer.quant_method.process_weights_after_loading(layer)

    def addresses(self, layer):
        return {name: (parameter.data_ptr(), tuple(parameter.shape)) for name, parameter in layer.named_parameters()}

    def assert_holds(self, layer, weight, scaled):
        expected = nested(weight, scaled)
        self.assertEqual(layer.nestedfp_shape, (ROWS, COLUMNS, 0))
        for name, value in (("weight", expected.upper), ("weight_lower", expected.lower), ("weight_scale", expected.scale)):
            self.assertTrue(torch.equal(getattr(layer, name).data, value), name)
        self.assertTrue(torch.equal(layer.bias.data, weight[:, 1]))

    def test_weights_that_are_not_in_the_checkpoint(self):
        with self.assertRaisesRegex(ValueError, "^b: the checkpoint has no weights for this layer"):
            self.read(self.model(a=None, b=None), a=self.weight(1))

    def test_a_part_that_is_not_in_the_checkpoint_leaves_a_layer_dense(self):
        model = self.model(halved=2)
        with self.assertLogs("vllm.nestedfp", "INFO") as logs:
            self.read(model, halved_part1=self.weight(1))
        self.assertIn(f"halved stays dense: {ROWS * COLUMNS} of its {2 * ROWS * COLUMNS} weights", logs.output[0])
        self.assertIsNone(model.halved.nestedfp_shape)
        self.assertTrue(torch.equal(model.halved.weight.data[ROWS:], self.weight(1)))

    def test_dummy_weights_are_read_by_nobody(self):
        from vllm.config import LoadConfig
        from vllm.model_executor.model_loader import DummyModelLoader

        model = self.model(a=None)
        DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(model, SimpleNamespace(dtype=torch.float16))
        self.assertEqual(model.a.nestedfp_shape, (ROWS, COLUMNS, 0))
        self.assertFalse(self.loading._dummy)
        before = self.addresses(model.a)
        self.read(model, again=True, a=self.weight(1))  # as in training: the first real ones
        self.assert_holds(model.a, self.weight(1), False)
        self.assertEqual(self.addresses(model.a), before)

    def test_weights_that_are_read_again_lie_where_the_first_ones_did(self):
        model = self.model(a=None, b=None)
        self.read(model, a=self.weight(1), b=self.weight(2, exponents=True))
        self.assert_holds(model.a, self.weight(1), False)
        self.assert_holds(model.b, self.weight(2, exponents=True), True)
        before, forgotten = [self.addresses(layer) for layer in (model.a, model.b)], len(self.forgotten)
        self.assertEqual(self.refreshed, [])
        for seed in (3, 5):
            self.read(model, again=True, a=self.weight(seed), b=self.weight(seed + 1))
            self.assertEqual([self.addresses(layer) for layer in (model.a, model.b)], before)
            self.assert_holds(model.a, self.weight(seed), False)
            self.assert_holds(model.b, self.weight(seed + 1), True)  # scales of 1
        self.assertEqual(len(self.forgotten), forgotten)  # what CUDA graphs hold
        self.assertEqual([bias.data_ptr() for bias in self.refreshed],
                         [layer.bias.data_ptr() for _ in range(2) for layer in (model.a, model.b)])

    def test_scales_that_new_weights_may_need(self):
        model = self.model(a=None)
        self.read(model, a=self.weight(1))
        with self.assertRaisesRegex(ValueError, "a.weight: rows of the new weights have exponents.*--enable-sleep-mode"):
            self.read(model, again=True, a=self.weight(2, exponents=True))
        self.config.keeps_scales = True
        model = self.model(a=None)
        self.read(model, a=self.weight(1))
        self.read(model, again=True, a=self.weight(2, exponents=True))
        self.assert_holds(model.a, self.weight(2, exponents=True), True)

    def test_when_they_are_kept(self):
        from nestedfp.vllm import quantization
        from vllm.config import get_current_vllm_config

        found = []
        for sleep, transfer in ((False, None), (True, None), (False, "nccl")):
            given = get_current_vllm_config()
            made = quantization.NestedFPConfig()
            with patch.object(given, "model_config", SimpleNamespace(enable_sleep_mode=sleep, is_hybrid=True)), \
                    patch.object(given, "weight_transfer_config", transfer):
                made._prepare(torch.float16)
            found.append(made.keeps_scales)
        self.assertEqual(found, [False, True, True])

    def test_layers_stay_nested_or_dense(self):
        dense = self.weight(1)
        dense[0, 1] = 5
        model = self.model(a=None, b=None)
        self.read(model, a=dense, b=self.weight(2))
        self.assertEqual([layer.nestedfp_shape is None for layer in (model.a, model.b)], [True, False])
        before = self.addresses(model.a)
        self.read(model, again=True, a=self.weight(3), b=self.weight(4))
        self.assertIsNone(model.a.nestedfp_shape)
        self.assertEqual(self.addresses(model.a), before)
        self.assertTrue(torch.equal(model.a.weight.data, self.weight(3)))
        with self.assertRaisesRegex(ValueError, r"b.weight: the new weights do not nest .*holds a 5.*start it"):
            self.read(model, again=True, b=dense)

    def test_updates_of_a_part_of_a_layer(self):
        model = self.model(a=2, b=None)
        self.read(model, a_part0=self.weight(1), a_part1=self.weight(2), b=self.weight(3))
        before = model.a.weight.data.clone()
        self.read(model, again=True, b=self.weight(4))  # of no part: it stays
        self.assertTrue(torch.equal(model.a.weight.data, before))
        with self.assertRaisesRegex(ValueError, f"a: {ROWS * COLUMNS} of its {2 * ROWS * COLUMNS} weights were given"):
            self.read(model, again=True, a_part0=self.weight(5))

    def test_rows_of_a_nested_checkpoint_that_were_not_read(self):
        from nestedfp.vllm import checkpoint

        upper, lower, scale = checkpoint.unread(4, 8)
        planes = (upper.view(torch.uint8), lower, scale)
        with self.assertRaisesRegex(ValueError, "^x: the checkpoint has no weights for this layer"):
            checkpoint.clear_unread("x", *planes)
        for plane, value in zip(planes, (7, 8, 0.5)):
            plane[1:] = value
        lower[0] = 9
        checkpoint.clear_unread("x", *planes)
        self.assertEqual([plane[:, 0].tolist() for plane in planes],
                         [[0, 7, 7, 7], [0, 8, 8, 8], [1 / 256, 0.5, 0.5, 0.5]])
        scale[2] = float("nan")
        with self.assertRaisesRegex(ValueError, "^x: the checkpoint has weights without scales"):
            checkpoint.clear_unread("x", *planes)
        experts = [plane.clone() for plane in (checkpoint.unread(3, 4, 8)[0].view(torch.uint8), *checkpoint.unread(3, 4, 8)[1:])]
        for plane in experts:
            plane[1:] = 1
        checkpoint.clear_unread("x", *experts)
        self.assertEqual([plane.flatten(1)[:, 0].tolist() for plane in experts[::2]], [[0, 1, 1], [1 / 256, 1, 1]])

    def test_loaders_that_models_give_to_weights_themselves(self):
        """As vLLM's Mamba-2 mixer, on the second of two GPUs that share a group."""
        from vllm.model_executor.layers.mamba.mamba_mixer2 import mamba_v2_sharded_weight_loader
        from vllm.model_executor.model_loader import utils

        loader = mamba_v2_sharded_weight_loader([(ROWS, 0, False), (ROWS, ROWS // 2, True)], 2, 1)
        whole = torch.cat([self.weight(1), self.weight(2)[:ROWS // 2]])  # the second part is both GPUs'
        here = torch.cat([self.weight(1)[ROWS // 2:], self.weight(2)[:ROWS // 2]])
        model = self.model(a=1)
        model.a.weight.weight_loader = loader
        utils.record_metadata_for_reloading(model)
        self.read(model, a=whole)
        self.assertTrue(torch.equal(model.a.weight.data, nested(here).upper))
        before = self.addresses(model.a)
        self.read(model, again=True, a=whole / 2)
        self.assertTrue(torch.equal(model.a.weight.data, nested(here / 2).upper))
        self.assertEqual(self.addresses(model.a), before)

        self.config.nested = SimpleNamespace(uppers="nearest")
        model = self.model(a=1, b=1)
        model.a.weight.weight_loader = loader
        utils.record_metadata_for_reloading(model)
        pairs = whole.view(torch.uint8).view(*whole.shape, 2)
        for name, value in (("weight", pairs[..., 1].contiguous().view(torch.float8_e4m3fn)), ("weight_lower", pairs[..., 0]),
                            ("weight_scale", whole[:, :1].float())):
            parameter = getattr(model.a, name)
            parameter.weight_loader(parameter, value)
        pairs = here.view(torch.uint8).view(*here.shape, 2)
        self.assertTrue(torch.equal(model.a.weight.data.view(torch.uint8), pairs[..., 1]))
        self.assertTrue(torch.equal(model.a.weight_lower.data, pairs[..., 0]))
        self.assertTrue(torch.equal(model.a.weight_scale.data, here[:, :1].float()))
        self.assertNotEqual(model.b.weight_lower.weight_loader, loader)

    def test_weights_that_are_not_there_yet_get_no_memory(self):
        """Where vLLM gives some to what transformers has made without."""
        from nestedfp.vllm import quantization
        from vllm.model_executor.models.transformers.base import Base

        quantization.NestedFPConfig()._prepare(torch.float16)
        model = self.model(a=None)
        model.other = torch.nn.Linear(4, 4, device="meta")
        Base.init_parameters(SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float16),
                                             device_config=SimpleNamespace(device="cpu")), model)
        self.assertEqual([name for name, parameter in model.named_parameters() if parameter.is_meta], ["a.weight"])
        self.assertEqual((model.other.weight.dtype, model.other.weight.device.type), (torch.float16, "cpu"))
        del model.other
        self.read(model, a=self.weight(1))
        self.assert_holds(model.a, self.weight(1), False)

    def test_layers_of_other_types_stay_dense(self):
        config = self.config
        for nested_checkpoint, ignored in ((False, False), (True, True), (True, False)):
            config.nested = SimpleNamespace(uppers="nearest") if nested_checkpoint else None
            config.ignore = ["score.wide"] if ignored else []

            def make():
                return self.linear.ReplicatedLinear(COLUMNS, ROWS, params_dtype=torch.float32, quant_config=config,
                                                    prefix="score.wide")

            if nested_checkpoint and not ignored:
                with self.assertRaisesRegex(ValueError, "score.wide cannot be nested: it is float32"):
                    make()
            else:
                self.assertIsInstance(make().quant_method, self.linear.UnquantizedLinearMethod)

    def test_columns_that_the_kernels_do_not_take(self):
        def make():
            return self.linear.ReplicatedLinear(60, ROWS, params_dtype=torch.float16, quant_config=self.config,
                                                prefix="mlp.odd")

        self.assertIsInstance(make().quant_method, self.linear.UnquantizedLinearMethod)
        self.config.nested = SimpleNamespace(uppers="nearest")
        with self.assertRaisesRegex(ValueError, "mlp.odd cannot be nested: 60 input features are no multiple of 8"):
            make()
        self.config.ignore = ["mlp.odd"]
        self.assertIsInstance(make().quant_method, self.linear.UnquantizedLinearMethod)

    def test_layers_that_models_read_themselves_stay_dense(self):
        from vllm.config import get_current_vllm_config

        given, nested_method = get_current_vllm_config(), type(self.model(a=None).a.quant_method)
        for model, prefix, dense in (("isaac", "vision_embedding.1", True), ("qwen", "visual.resblocks.0.mlp.c_fc", True),
                                     ("qwen3", "score", True), ("qwen3", "model.layers.0.scores", False),
                                     ("qwen", "visual.resblocks.10.mlp.c_fc", False),
                                     ("longcat_flash", "model.layers.0.self_attn.0.kv_b_proj", True),
                                     ("deepseek_v3", "model.layers.0.self_attn.kv_b_proj", False)):
            with patch.object(given, "model_config", SimpleNamespace(hf_config=SimpleNamespace(model_type=model))):
                made = self.linear.ReplicatedLinear(COLUMNS, ROWS, params_dtype=torch.float16, quant_config=self.config,
                                                    prefix=prefix)
            self.assertIs(type(made.quant_method), self.linear.UnquantizedLinearMethod if dense else nested_method)

    def test_kernels_of_vllm_s_that_were_chosen_for_the_weight_as_it_was_made(self):
        from vllm.model_executor.models.deepseek_v2 import DeepSeekV2FusedQkvAProjLinear

        model = self.model(a=None)
        model.a._use_min_latency_gemm = True
        self.read(model, a=self.weight(1))
        self.assertFalse(model.a._use_min_latency_gemm)
        self.assertIn("_use_min_latency_gemm", DeepSeekV2FusedQkvAProjLinear.forward.__code__.co_names)

    def test_experts_that_are_read_again(self):
        """The mixture that CUDA graphs were captured of stays, and its memory gets the new weights."""
        sys.path.insert(0, str(HERE))
        import test_plugin
        from make_models import EXPERTS
        from nestedfp.vllm import experts, fused_moe
        from vllm.model_executor.model_loader.reload import layerwise, record_metadata_for_reloading

        made, forms = [], []

        def nest(weight, gated, form):
            forms.append(form)
            stack = experts.Stack(*weight.shape, weight.device, gated)
            stack.bytes.fill_(0)
            stack.bytes[:, :2 * stack.n * stack.k] = weight.reshape(stack.experts, -1).contiguous().view(torch.uint8)
            stack.scale = self.op.scale_of_form(stack.scale, form.scaled)
            return stack

        def mixture(*stacks):
            made.append(SimpleNamespace(stacks=stacks[:2]))
            return made[-1]

        layer = test_plugin.InsideVllm.mixture_layer(self, self.config)
        self.assertIsInstance(layer.quant_method, fused_moe.NestedOnlineExpertsMethod)
        model = torch.nn.ModuleList([layer])
        record_metadata_for_reloading(model)

        def read(value, names=("w1", "w3", "w2"), count=EXPERTS, by_layer=False):
            for e in range(count):
                for shard in names:
                    parameter = layer.w2_weight if shard == "w2" else layer.w13_weight
                    rows, columns = parameter.shape[1] // (1 if shard == "w2" else 2), parameter.shape[2]
                    load = layer.weight_loader if by_layer else parameter.weight_loader
                    load(parameter, torch.full((rows, columns), value + e, dtype=torch.float16), "experts.weight",
                         shard_id=shard, expert_id=e, return_success=True)
            layerwise.finalize_layerwise_processing(model, SimpleNamespace(dtype=torch.float16))

        with patch.object(experts, "nest", nest), patch.object(experts, "Mixture", mixture):
            with self.assertRaisesRegex(ValueError, "experts: the checkpoint has no weights for this layer"):
                read(1, count=0)
            layer = test_plugin.InsideVllm.mixture_layer(self, self.config)
            model = torch.nn.ModuleList([layer])
            record_metadata_for_reloading(model)
            read(1)
            before, kept = self.addresses(layer), [stack.bytes.data_ptr() for stack in made[0].stacks]
            for value, by_layer in ((50, False), (20, True)):  # True: by vLLM's backend for transformers
                layerwise.initialize_layerwise_reload(model)
                read(value, by_layer=by_layer)
                self.assertEqual(self.addresses(layer), before)
                self.assertEqual(([stack.bytes.data_ptr() for stack in made[0].stacks], len(made)), (kept, 1))
                self.assertIs(layer.nestedfp_experts, made[0])
                for stack in made[0].stacks:
                    values = stack.bytes[:, :2 * stack.n * stack.k].view(torch.float16)
                    self.assertEqual([values[e].unique().tolist() for e in range(EXPERTS)],
                                     [[value + e] for e in range(EXPERTS)])
            self.assertEqual(forms, [experts.Form()] * 2 + [experts.Form(False, frozenset())] * 4)
            layerwise.initialize_layerwise_reload(model)
            with self.assertRaisesRegex(ValueError, "experts: .* weights were given"):
                read(7, names=("w1",))

    def test_latent_attention_gets_weights_and_not_their_uppers(self):
        """In vLLM's own code, whatever precision so many rows, or the step before, would have."""
        from nestedfp.vllm.op import Step, forced
        from vllm.model_executor.layers.attention import MLAAttention

        seen = []

        def apply(layer, x, bias=None):
            seen.append(Step.forced)
            return x @ torch.ones(4, 10, dtype=x.dtype)

        attention = MLAAttention.__new__(MLAAttention)
        torch.nn.Module.__init__(attention)
        for name, value in {"kv_lora_rank": 4, "num_heads": 2, "qk_nope_head_dim": 3, "v_head_dim": 2, "quant_config": None,
                            "is_aiter_triton_fp4_bmm_enabled": False, "is_aiter_triton_fp8_bmm_enabled": False}.items():
            setattr(attention, name, value)
        for name in "qkv":
            setattr(attention, f"_{name}_scale", torch.ones(1))
        attention._prob_scale = torch.ones(1)
        attention.kv_b_proj = torch.nn.Module()
        attention.kv_b_proj.weight = torch.nn.Parameter(torch.empty(8, dtype=torch.uint8), requires_grad=False)
        attention.kv_b_proj.input_size_per_partition = 4
        attention.kv_b_proj.quant_method = SimpleNamespace(apply=apply)
        with patch.dict(self.op._devices, {0: None}):
            attention.process_weights_after_loading(torch.float16)
            with forced(_library.FP8):
                attention.process_weights_after_loading(torch.float16)
                self.assertEqual(Step.forced, _library.FP8)
        self.assertEqual((seen, Step.forced), ([_library.FP16] * 2, None))
        self.assertEqual(tuple(attention.W_UV.shape), (2, 4, 2))
        with patch.dict(self.op._devices, clear=True):  # nothing is nested: nothing of ours runs
            attention.process_weights_after_loading(torch.float16)
        self.assertIsNone(seen[-1])

    def test_what_a_worker_does_afterwards(self):
        from nestedfp.vllm import rotary

        done = []

        class Worker:
            def reload_weights(self, *args, **kwargs):
                done.append("reload")

            def finish_weight_update(self):
                done.append("update")

            def wake_up(self, tags=None):
                done.append("wake")
                return 5

        with patch.dict(sys.modules, {"vllm.v1.worker.gpu_worker": SimpleNamespace(Worker=Worker)}), \
                patch.object(self.op, "refresh", lambda: done.append("refresh")), \
                patch.object(rotary, "refresh", lambda: done.append("norms")), \
                patch.object(self.op, "clear_workspaces", lambda: done.append("clear")):
            self.loading._follow_worker()
            self.loading._follow_worker()
            worker = Worker()
            worker.reload_weights(weights_path="x")
            worker.finish_weight_update()
            self.assertEqual((worker.wake_up(), worker.wake_up(["kv_cache"]), worker.wake_up(tags=["weights"])), (5, 5, 5))
        self.assertEqual(done, ["reload", "refresh", "norms", "update", "refresh", "norms", "wake", "clear", "wake", "wake",
                                "clear"])
        from vllm.v1.worker.gpu_worker import Worker as Real

        for name in ("reload_weights", "finish_weight_update", "wake_up"):
            self.assertTrue(callable(getattr(Real, name)))

    def test_layers_forms_are_in_the_compile_cache_s_key(self):
        """Two checkpoints of one config.json whose layers nest differently must not share a graph."""
        from vllm.config import DeviceConfig, VllmConfig

        dense = self.weight(1)
        dense[0, 1] = 5
        keys = []
        for second in (self.weight(2), self.weight(9), self.weight(2, exponents=True), dense):
            model = self.model(a=None, b=None)
            self.read(model, a=self.weight(1), b=second)
            part = VllmConfig(device_config=DeviceConfig("cpu"))
            model.a.vllm_config = part  # of a part of the model that is compiled alone
            config = VllmConfig(device_config=DeviceConfig("cpu"))
            self.loading.mark(model, config)
            self.assertEqual(config.compute_hash(), part.compute_hash())
            keys.append(config.compute_hash())
            self.loading.mark(model, config)
            self.assertEqual(config.compute_hash(), keys[-1])
        self.assertEqual(keys[0], keys[1])
        self.assertEqual(len(set(keys)), 3)
        config = VllmConfig(device_config=DeviceConfig("cpu"))
        before = config.compute_hash()
        self.loading.mark(torch.nn.Linear(2, 2), config)  # of another quantization
        self.assertEqual(config.compute_hash(), before)


if __name__ == "__main__":
    unittest.main(verbosity=1)
