"""Attention in the place of vLLM's FlashAttention: which sequences run which kernel, and on a GPU what comes out beside
FlashAttention over the same cache."""

import ctypes
import unittest
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np

from nestedfp.vllm.attention_batch import SHORT_CONTEXT, split

try:
    import torch
    import vllm  # noqa: F401

    HAVE_VLLM = True
except ImportError:
    HAVE_VLLM = False
HAVE_GPU = HAVE_VLLM and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


class Batches(unittest.TestCase):
    def split(self, *lengths, longest=100, contexts=None, group=4, kv_heads=8):
        contexts = np.array(contexts or [longest] * len(lengths), dtype=np.int32)
        return split(np.array(lengths, dtype=np.int32), contexts, group, kv_heads)

    def test_sequences_of_one_token_ahead_decode(self):
        self.assertEqual(self.split(1, 1, 1, 7, 1, 30), (3, 38))
        self.assertEqual(self.split(1, 1), (2, 0))
        self.assertEqual(self.split(9, 1), (0, 10))
        self.assertEqual(self.split(1, 0, 1), (1, 1))

    def test_few_tokens_over_long_contexts_are_flash_attention_s(self):
        self.assertIsNone(self.split(1, 20, longest=SHORT_CONTEXT + 1))
        self.assertEqual(self.split(1, 20, longest=SHORT_CONTEXT), (1, 20))
        self.assertEqual(self.split(1, 256, longest=100000), (1, 256))  # 8 tiles of each of 8 heads
        self.assertIsNone(self.split(224, longest=100000))
        self.assertEqual(self.split(1, 1, longest=100000), (2, 0))

    def test_a_long_context_is_not_waited_for(self):
        """Tiles of short contexts beside it are soon done; and one of sequences ahead is the decode kernel's."""
        self.assertIsNone(self.split(20, 2000, contexts=[100000, 2000]))
        self.assertIsNone(self.split(2000, 1, contexts=[2000, 50000]))
        self.assertEqual(self.split(2000, 1, contexts=[2000, 3000]), (0, 2001))
        self.assertEqual(self.split(1, 20, contexts=[100000, 400]), (1, 20))
        self.assertEqual(self.split(300, 300, contexts=[50000, 60000]), (0, 600))
        self.assertEqual(self.split(2, 0, contexts=[70, 100000]), (0, 2))


@unittest.skipUnless(HAVE_VLLM, "needs torch and vLLM")
class Calls(unittest.TestCase):
    """What libnestedfp is asked for, without a GPU: a stand-in takes the calls."""

    HEADS, KV_HEADS, SIZE, BLOCK_SIZE, BLOCKS = 6, 2, 32, 16, 9
    ROW = (HEADS + 2 * KV_HEADS) * SIZE

    def setUp(self):
        from nestedfp import _library
        from nestedfp.vllm import attention

        self.attention, self.calls = attention, []

        def take(name):
            def function(handle, call, stream):
                copy = _library.AttentionCall.from_buffer_copy(call)
                self.calls.append((name, copy, self.tensor_at(copy.q)))
                return 0
            return function

        names = ("decode", "prefill", "append")
        library = SimpleNamespace(**{f"nfp_attention_{name}": take(name) for name in names})
        self.impl = attention.Impl.__new__(attention.Impl)
        for name, value in {"num_heads": self.HEADS, "num_kv_heads": self.KV_HEADS, "head_size": self.SIZE, "scale": 0.5,
                            "logits_soft_cap": 0, "nestedfp_window": 0, "nestedfp_rotation": None,
                            "nestedfp_library": library, "nestedfp_fits": True}.items():
            setattr(self.impl, name, value)
        self.builder = attention.Builder.__new__(attention.Builder)
        for name, value in {"block_size": self.BLOCK_SIZE, "num_heads_q": self.HEADS, "num_heads_kv": self.KV_HEADS,
                            "nestedfp_asked": True, "nestedfp_drafts": False, "nestedfp_type": _library.KV_F16,
                            "nestedfp_workspace": torch.zeros(64, dtype=torch.uint8),
                            "kv_cache_spec": SimpleNamespace(num_kv_heads=self.KV_HEADS)}.items():
            setattr(self.builder, name, value)
        for target, name, value in ((attention, "device", lambda index: SimpleNamespace(handle=None)),
                                    (torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=None))):
            patched = patch.object(target, name, value)
            patched.start()
            self.addCleanup(patched.stop)
        self.cache = torch.zeros(self.BLOCKS, 2, self.KV_HEADS, self.BLOCK_SIZE, self.SIZE).half().permute(0, 1, 3, 2, 4)
        self.rows = torch.arange(8 * self.ROW).view(8, self.ROW).half()

    def tensor_at(self, address):
        """The first token's queries there, in the order in which kernels read them."""
        numbers = (ctypes.c_uint16 * (self.HEADS * self.SIZE)).from_address(address)
        return torch.from_numpy(np.frombuffer(numbers, np.float16).copy())

    def common(self, lengths, contexts, **other):
        starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
        return SimpleNamespace(**{
            "num_reqs": len(lengths), "num_actual_tokens": int(starts[-1]), "max_query_len": max(lengths),
            "max_seq_len": max(contexts), "query_start_loc": starts, "query_start_loc_cpu": starts, "causal": True,
            "seq_lens": torch.tensor(contexts, dtype=torch.int32),
            "block_table_tensor": torch.zeros(len(lengths), 7, dtype=torch.int32), "slot_mapping": None, **other})

    def run_layer(self, common, query, key=None, value=None):
        metadata = self.builder.build(0, common)
        out = torch.zeros(len(query), self.HEADS, self.SIZE).half()
        self.impl.forward(None, query, key, value, self.cache, metadata, out)
        calls, self.calls = self.calls, []
        return calls

    def parts(self, tokens):
        row = self.rows[:tokens]
        return [part.view(tokens, -1, self.SIZE) for part in
                row.split([self.HEADS * self.SIZE, self.KV_HEADS * self.SIZE, self.KV_HEADS * self.SIZE], dim=1)]

    def test_the_batch_and_the_cache(self):
        common = self.common([1, 1, 6], [40, 3, 6])
        (first, decode, _), (second, prefill, _) = self.run_layer(common, self.parts(8)[0])
        self.assertEqual((first, decode.first_sequence, decode.sequences), ("decode", 0, 2))
        self.assertEqual((second, prefill.first_sequence, prefill.sequences, prefill.tokens), ("prefill", 2, 1, 6))
        for call in (decode, prefill):
            self.assertEqual((call.query_start, call.context, call.block_table, call.table_width),
                             (common.query_start_loc.data_ptr(), common.seq_lens.data_ptr(),
                              common.block_table_tensor.data_ptr(), 7))
            numbers = self.KV_HEADS * self.BLOCK_SIZE * self.SIZE
            self.assertEqual((call.blocks, call.block_stride, call.keys, call.values - call.keys),
                             (self.BLOCKS, 2 * numbers, self.cache.data_ptr(), 2 * numbers))
            self.assertEqual((call.q_stride, call.cos_sin), (self.ROW, None))

    def test_contexts_that_the_host_knows(self):
        known = torch.tensor([100000, 60], dtype=torch.int32)
        for fields, plan in (({}, False), ({"seq_lens_cpu_upper_bound": known}, True), ({"_seq_lens_cpu": known}, True),
                             ({"_seq_lens_cpu": known, "seq_lens_cpu_upper_bound": known.flip(0)}, True),
                             ({"seq_lens_cpu_upper_bound": known[:1]}, False)):  # of another batch
            with patch.object(self.attention.FlashAttentionMetadataBuilder, "build", lambda *_: None):
                self.assertEqual(self.builder.build(0, self.common([1, 4], [100000, 60], **fields)) is not None, plan)

    def test_queries_wherever_their_heads_lie(self):
        query = self.parts(8)[0]
        expected = query[0].flatten()
        apart = torch.zeros(8, self.HEADS, 2 * self.SIZE).half()
        apart[..., :self.SIZE] = query
        for made in (query, query.contiguous(), apart[..., :self.SIZE],
                     query.transpose(0, 1).contiguous().transpose(0, 1)):
            (_, call, seen), = self.run_layer(self.common([8], [8]), made)
            self.assertTrue(torch.equal(seen, expected))
            self.assertEqual(call.q_stride, made.stride(0) if made is query else self.HEADS * self.SIZE)

    def test_more_sequences_than_a_call_takes_are_flash_attention_s(self):
        flash = object()
        with patch.object(self.attention.FlashAttentionMetadataBuilder, "build", lambda *_: flash):
            most = self.attention._library.library().nfp_max_attention_rows() // self.KV_HEADS
            self.assertIsNot(self.builder.build(0, self.common([1] * most, [1] * most)), flash)
            self.assertIs(self.builder.build(0, self.common([1] * (most + 1), [1] * (most + 1))), flash)
            # As are common prefixes, drafts and queries that see all keys.
            self.assertIs(self.builder.build(16, self.common([1], [20])), flash)
            self.assertIs(self.builder.build(0, self.common([1], [20], causal=False)), flash)
            self.builder.nestedfp_drafts = True
            self.assertIs(self.builder.build(0, self.common([4, 1], [20, 20])), flash)
            self.assertIsNot(self.builder.build(0, self.common([1, 1], [20, 20])), flash)

    def test_what_a_joined_layer_rotates_by(self):
        table, weights = torch.zeros(64, self.SIZE), torch.ones(2, self.SIZE)
        common = self.common([1, 7], [40, 7])
        metadata = SimpleNamespace(query_start_loc=common.query_start_loc, seq_lens=common.seq_lens,
                                   block_table=common.block_table_tensor, num_actual_tokens=8)
        for norms in ((), (weights[0], weights[1], 1e-5)):
            self.impl.nestedfp_rotation = self.attention.Rotation(table, *norms)
            expected = [part.data_ptr() for part in (table, *norms[:2])] + ([] if norms else [None, None])
            calls = self.run_layer(common, *self.parts(8))
            with patch.object(self.attention.FlashAttentionImpl, "forward", lambda *arguments: arguments[2]):
                query = self.impl.forward(None, *self.parts(8), self.cache, metadata, None)
            self.assertEqual(query.data_ptr(), self.rows.data_ptr())
            (append, call, _), = self.calls
            self.assertEqual((append, call.sequences, call.tokens, call.block_size), ("append", 2, 8, self.BLOCK_SIZE))
            for _, call, _ in (*calls, *self.calls):
                self.assertEqual([call.cos_sin, call.q_norm, call.k_norm], expected)
                self.assertAlmostEqual(call.norm_epsilon, norms[2] if norms else 0)
                self.assertEqual((call.q, call.q_stride), (self.rows.data_ptr(), self.ROW))
            self.calls = []
            # Parts that do not lie in one row are put there.
            (_, call, seen), *_ = self.run_layer(common, *(part.contiguous() for part in self.parts(8)))
            self.assertNotEqual(call.q, self.rows.data_ptr())
            self.assertEqual((call.q_stride, seen.tolist()), (self.ROW, self.parts(8)[0][0].flatten().tolist()))

    def test_layers_of_one_batch_do_not_see_each_other_s_rotation(self):
        common = self.common([1], [40])
        metadata = self.builder.build(0, common)
        out = torch.zeros(1, self.HEADS, self.SIZE).half()
        for rotation in (self.attention.Rotation(torch.zeros(64, self.SIZE), *torch.ones(2, self.SIZE), 1e-6), None,
                         self.attention.Rotation(torch.zeros(64, self.SIZE))):
            self.impl.nestedfp_rotation = rotation
            self.impl.forward(None, *self.parts(1), self.cache, metadata, out)
        self.assertEqual([(call.cos_sin is not None, call.cos_sin is not None and call.q_norm is not None)
                          for _, call, _ in self.calls], [(True, True), (False, False), (True, False)])


@unittest.skipUnless(HAVE_GPU, "needs vLLM and a Hopper GPU")
class BesideFlashAttention(unittest.TestCase):
    BLOCKS, BLOCK_SIZE = 800, 16

    def setUp(self):
        torch.manual_seed(5)

    def batch(self, lengths, contexts):
        """What a builder of vLLM's is given: the sequences' blocks are anywhere."""
        starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
        width = max(contexts) // self.BLOCK_SIZE + 2
        table = torch.full((len(lengths), width), 0x3FFFFFFF, dtype=torch.int32)
        free = (torch.randperm(self.BLOCKS - 1) + 1).tolist()
        for s, context in enumerate(contexts):
            for i in range((context + self.BLOCK_SIZE - 1) // self.BLOCK_SIZE):
                table[s, i] = free.pop()
        positions = np.concatenate([np.arange(c - n, c) for n, c in zip(lengths, contexts)])
        rows = np.repeat(np.arange(len(lengths)), lengths)
        slots = table[rows, positions // self.BLOCK_SIZE].long() * self.BLOCK_SIZE + torch.tensor(positions % self.BLOCK_SIZE)
        return SimpleNamespace(num_reqs=len(lengths), num_actual_tokens=int(starts[-1]), max_query_len=max(lengths),
                               max_seq_len=max(contexts), query_start_loc=starts.cuda(), query_start_loc_cpu=starts,
                               seq_lens=torch.tensor(contexts, dtype=torch.int32).cuda(), causal=True,
                               block_table_tensor=table.cuda(), slot_mapping=slots.cuda(),
                               positions=torch.tensor(positions).cuda())

    def builder(self, impl, dtype):
        from nestedfp import _library
        from nestedfp.vllm import attention

        made = attention.Builder.__new__(attention.Builder)
        made.block_size, made.num_heads_q, made.num_heads_kv = self.BLOCK_SIZE, impl.num_heads, impl.num_kv_heads
        made.nestedfp_asked, made.nestedfp_drafts = True, False
        made.kv_cache_spec = SimpleNamespace(num_kv_heads=impl.num_kv_heads)
        made.nestedfp_type = _library.KV_BF16 if dtype is torch.bfloat16 else _library.KV_F16
        made.nestedfp_workspace = torch.zeros(impl.workspace_bytes(0, self.BLOCK_SIZE, made.nestedfp_type),
                                              dtype=torch.uint8, device="cuda")
        return made

    def impl(self, heads, kv_heads, size, window, cap):
        from nestedfp.vllm import attention

        made = attention.Impl(heads, size, size**-0.5, kv_heads, None, window, "auto", cap)
        self.assertTrue(made.nestedfp_fits)
        return made

    def cache(self, kv_heads, size, dtype):
        physical = torch.randn(self.BLOCKS, 2, kv_heads, self.BLOCK_SIZE, size, device="cuda").to(dtype)
        return physical.permute(0, 1, 3, 2, 4)  # HND

    def flash(self, common, workspace=None):
        from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

        return FlashAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens, max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc, max_seq_len=common.max_seq_len, seq_lens=common.seq_lens,
            block_table=common.block_table_tensor, slot_mapping=common.slot_mapping, use_cascade=False,
            common_prefix_len=0, cu_prefix_query_lens=None, prefix_kv_lens=None, suffix_kv_lens=None)

    SHAPES = [(32, 8, 128, None, None), (8, 8, 64, None, 30.0), (12, 1, 256, 100, None), (6, 2, 80, None, None)]
    BATCHES = [([1] * 9, [1, 17, 300, 900, 16, 33, 128, 2, 511]), ([1], [700]),
               ([1, 1, 40, 129, 1, 7], [50, 301, 40, 400, 77, 90]), ([200], [200])]

    def test_same_numbers(self):
        layer = SimpleNamespace(_q_scale=torch.ones(1, device="cuda"), _k_scale=torch.ones(1, device="cuda"),
                                _v_scale=torch.ones(1, device="cuda"))
        for dtype, step in ((torch.float16, 2**-10), (torch.bfloat16, 2**-7)):
            for heads, kv_heads, size, window, cap in self.SHAPES:
                impl = self.impl(heads, kv_heads, size, window, cap)
                builder = self.builder(impl, dtype)
                for lengths, contexts in self.BATCHES:
                    with self.subTest(dtype=dtype, heads=heads, size=size, lengths=lengths):
                        common, cache = self.batch(lengths, contexts), self.cache(kv_heads, size, dtype)
                        tokens = common.num_actual_tokens
                        row = torch.randn(tokens, (heads + 2 * kv_heads) * size, device="cuda").to(dtype)
                        query = row[:, :heads * size].view(tokens, heads, size)
                        ours, theirs = (torch.empty(tokens, heads, size, dtype=dtype, device="cuda") for _ in range(2))
                        metadata = builder.build(0, common)
                        self.assertIsNotNone(metadata.nestedfp)
                        impl.forward(layer, query, None, None, cache, metadata, ours)
                        impl.forward(layer, query, None, None, cache, self.flash(common), theirs)
                        # Both round weights and results to 16 bits; sums of values of size 1.
                        worst = float((ours.float() - theirs.float()).abs().max())
                        self.assertLessEqual(worst, 4 * step)

    def test_rotation_and_append(self):
        """As vLLM's norms of heads, rotary embedding and update of the cache before FlashAttention, by both ways that a
        joined layer takes: our kernels, and FlashAttention behind our append."""
        from nestedfp.vllm import attention
        from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
        from vllm.config import VllmConfig, set_current_vllm_config

        layer = SimpleNamespace(_q_scale=torch.ones(1, device="cuda"), _k_scale=torch.ones(1, device="cuda"),
                                _v_scale=torch.ones(1, device="cuda"))
        heads, kv_heads, size = 12, 4, 128
        weights = 1 + 0.2 * torch.randn(2, size, device="cuda")

        def normed(x, weight):
            heads = x.reshape(len(x), -1, size).float()
            heads = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
            return heads.to(x.dtype).view(x.shape)

        for dtype, step, has_norms in ((torch.float16, 2**-10, False), (torch.bfloat16, 2**-7, False),
                                       (torch.float16, 2**-10, True), (torch.bfloat16, 2**-7, True)):
            norms = (*(weights.to(dtype).float()), 1e-6) if has_norms else ()
            with set_current_vllm_config(VllmConfig()):
                rotary = RotaryEmbedding(size, size, 1024, 10000.0, True, dtype).cuda()
            impl = self.impl(heads, kv_heads, size, None, None)
            builder = self.builder(impl, dtype)
            for lengths, contexts in [*self.BATCHES, ([1] * 80, [1 + 3 * i for i in range(80)])]:
                common = self.batch(lengths, contexts)
                tokens = common.num_actual_tokens
                row = torch.randn(tokens, (heads + 2 * kv_heads) * size, device="cuda").to(dtype)
                first = self.cache(kv_heads, size, dtype)
                results = []
                for way in ("vllm", "ours", "flash", "apart"):
                    with self.subTest(dtype=dtype, norms=has_norms, lengths=lengths, way=way):
                        cache = first.clone(memory_format=torch.preserve_format)
                        self.assertEqual(cache.stride(), first.stride())
                        q, k, v = row.clone().split([heads * size, kv_heads * size, kv_heads * size], dim=1)
                        impl.nestedfp_rotation = None
                        if way == "vllm":
                            if has_norms:
                                q, k = normed(q, norms[0]), normed(k, norms[1])
                            q, k = rotary.forward_native(common.positions, q.contiguous(), k.contiguous())
                        else:
                            impl.nestedfp_rotation = attention.Rotation(rotary.cos_sin_cache.float().contiguous(), *norms)
                        if way == "apart":
                            k = k.contiguous()
                        q, k, v = q.view(tokens, heads, size), k.view(tokens, kv_heads, size), v.view(tokens, kv_heads, size)
                        if way == "vllm":
                            impl.do_kv_cache_update(layer, k, v, cache, common.slot_mapping)
                        out = torch.empty(tokens, heads, size, dtype=dtype, device="cuda")
                        metadata = builder.build(0, common) if way in ("ours", "apart") else self.flash(common)
                        impl.forward(layer, q, k, v, cache, metadata, out)
                        results.append((out.float(), cache.float()))
                        # FP32 against 16-bit steps of norm and rotation, and scores of keys that differ by as much.
                        self.assertLessEqual(float((results[-1][1] - results[0][1]).abs().max()),
                                             (12 if has_norms else 8) * step)
                        self.assertLessEqual(float((results[-1][0] - results[0][0]).abs().max()), 16 * step)
                        if way != "vllm":
                            changed = (cache != first).any(-1).any(-1).nonzero()  # [block, which, place]
                            written = {(int(b) * self.BLOCK_SIZE + int(p)) for b, _, p in changed}
                            self.assertEqual(written, set(common.slot_mapping.tolist()))


if __name__ == "__main__":
    unittest.main(verbosity=1)
