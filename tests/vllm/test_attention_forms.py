"""Our attention inside what vLLM builds around FlashAttention: chunks, pooled blocks, prompts that only need their last
tokens, microbatches. On the CPU, over vLLM's own code: a stand-in does what include/nestedfp.h says of the two kernels,
and that a call keeps to it. Needs vLLM and no GPU."""

import ctypes
import unittest
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
from nestedfp import _library

try:
    import torch
    import vllm  # noqa: F401

    HAVE_VLLM = True
except ImportError:
    HAVE_VLLM = False

HEADS, KV_HEADS, SIZE, BLOCK, SCALE = 4, 2, 16, 16, 0.3


def at(address, count, kind):
    """An array there."""
    number = {np.int32: ctypes.c_int32, np.float16: ctypes.c_uint16}[kind]
    return np.frombuffer((number * count).from_address(address), kind)


class Library:
    """nfp_attention_decode and nfp_attention_prefill of FP16, without windows."""

    def __init__(self):
        self.calls = []

    def run(self, name, call):
        last = call.first_sequence + call.sequences
        starts, contexts = at(call.query_start, last + 1, np.int32), at(call.context, last, np.int32)
        table = at(call.block_table, last * call.table_width, np.int32).reshape(last, call.table_width)
        block = call.kv_heads * call.block_size * call.head_dim
        keys, values = (np.lib.stride_tricks.as_strided(
            at(first, (call.blocks - 1) * call.block_stride + block, np.float16),
            (call.blocks, call.kv_heads, call.block_size, call.head_dim),
            [2 * n for n in (call.block_stride, call.block_size * call.head_dim, call.head_dim, 1)]).astype(np.float32)
            for first in (call.keys, call.values))
        out = at(call.out, int(starts[last]) * call.heads * call.head_dim, np.float16).reshape(-1, call.heads, call.head_dim)
        for s in range(call.first_sequence, last):
            tokens = int(starts[s + 1] - starts[s])
            assert contexts[s] >= tokens and (tokens == 1 or name == "prefill"), (name, s, tokens, contexts[s])
            for i in range(tokens):
                seen = np.arange(contexts[s] - tokens + i + 1)
                blocks, places = table[s, seen // call.block_size], seen % call.block_size
                token = int(starts[s]) + i
                query = at(call.q + 2 * call.q_stride * token, call.heads * call.head_dim, np.float16)
                out[token] = attend(query.reshape(call.heads, -1), keys[blocks, :, places], values[blocks, :, places])
        self.calls.append((name, call.sequences, call.tokens if name == "prefill" else call.sequences))
        return 0

    def nfp_attention_decode(self, handle, call, stream):
        return self.run("decode", call)

    def nfp_attention_prefill(self, handle, call, stream):
        return self.run("prefill", call)


def attend(query, keys, values):
    """One token's heads; keys, values: [context, KV heads, SIZE]."""
    group = len(query) // keys.shape[1]
    scores = np.einsum("hd,khd->hk", query.astype(np.float32), np.repeat(keys, group, 1)) * SCALE
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return np.einsum("hk,khd->hd", weights / weights.sum(1, keepdims=True), np.repeat(values, group, 1))


@unittest.skipUnless(HAVE_VLLM, "needs torch and vLLM")
class Forms(unittest.TestCase):
    def setUp(self):
        from nestedfp.vllm import attention

        self.attention, self.library = attention, Library()
        for target, name, value in ((attention, "device", lambda index: SimpleNamespace(handle=None)),
                                    (torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=None))):
            patched = patch.object(target, name, value)
            patched.start()
            self.addCleanup(patched.stop)
        torch.manual_seed(3)

    def made(self, backend, heads=HEADS, kv_heads=KV_HEADS, block=BLOCK):
        """Its builder and its layer, without what needs a GPU."""
        builder, layer = (kind.__new__(kind) for kind in (backend.get_builder_cls(), backend.get_impl_cls()))
        for name, value in {"block_size": block, "num_heads_q": heads, "num_heads_kv": kv_heads, "nestedfp_asked": True,
                            "nestedfp_drafts": False, "nestedfp_type": _library.KV_F16, "device": torch.device("cpu"),
                            "nestedfp_workspace": torch.zeros(64, dtype=torch.uint8),
                            "kv_cache_spec": SimpleNamespace(num_kv_heads=kv_heads, block_size=block)}.items():
            setattr(builder, name, value)
        for name, value in {"num_heads": heads, "num_kv_heads": kv_heads, "head_size": SIZE, "scale": SCALE,
                            "logits_soft_cap": 0, "nestedfp_window": 0, "nestedfp_rotation": None,
                            "nestedfp_library": self.library, "nestedfp_fits": True}.items():
            setattr(layer, name, value)
        return builder, layer

    def batch(self, lengths, contexts):
        """What a runner makes of a step; and positions and sequences of its tokens."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
        counts = [-(-context // BLOCK) for context in contexts]
        table = torch.zeros(len(lengths), max(counts) + 2, dtype=torch.int32)
        free = iter((torch.randperm(sum(counts)) + 1).tolist())
        for s, count in enumerate(counts):
            for i in range(count):
                table[s, i] = next(free)
        positions = np.concatenate([np.arange(c - n, c) for n, c in zip(lengths, contexts)])
        sequences = np.repeat(np.arange(len(lengths)), lengths)
        slots = table[sequences, positions // BLOCK].long() * BLOCK + torch.tensor(positions % BLOCK)
        context = torch.tensor(contexts, dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts.clone(), seq_lens=context, num_reqs=len(lengths),
            num_actual_tokens=int(starts[-1]), max_query_len=max(lengths), max_seq_len=max(contexts),
            block_table_tensor=table, slot_mapping=slots, _seq_lens_cpu=context.clone(),
            seq_lens_cpu_upper_bound=context.clone())
        return common, positions, sequences

    def cache(self, table, kv_heads=KV_HEADS, block=BLOCK):
        blocks = int(table.max()) + 1
        return torch.randn(blocks, 2, kv_heads, block, SIZE).half().permute(0, 1, 3, 2, 4)

    def assert_attends(self, out, query, cache, table, positions, sequences, first=lambda position: 0):
        block = cache.shape[2]
        for token, (position, s) in enumerate(zip(positions, sequences)):
            seen = np.arange(first(int(position)), int(position) + 1)
            rows = cache[table[s, seen // block].long(), :, torch.tensor(seen % block)].float().numpy()
            wanted = attend(query[token].numpy(), rows[:, 0], rows[:, 1])
            self.assertLess(float(np.abs(out[token].float().numpy() - wanted).max()), 2e-3, (token, position, s))

    def run_layer(self, layer, metadata, query, cache, key=None, value=None):
        self.library.calls = []
        out = torch.full_like(query, 7)
        holder = SimpleNamespace(kv_sharing_target_layer_name=None)
        layer.forward(holder, query, key, value, cache, metadata, out)
        return out

    BATCHES = [([1, 1, 1], [5, 33, 64]), ([1, 40, 7, 64], [50, 90, 7, 64]), ([70], [150])]

    def test_chunks(self):
        """Llama 4's: a query sees its own chunk."""
        from vllm.model_executor.layers.attention.chunked_local_attention import create_chunked_local_attention_backend

        builder, layer = self.made(create_chunked_local_attention_backend(self.attention.Backend, 32))
        for lengths, contexts in self.BATCHES:
            common, positions, sequences = self.batch(lengths, contexts)
            cache, query = self.cache(common.block_table_tensor), torch.randn(len(positions), HEADS, SIZE).half()
            metadata = builder.build(0, common)
            other = common.block_table_tensor.flip(1)  # a table of another group of layers
            for made, table in ((metadata, common.block_table_tensor),
                                (builder.update_block_table(metadata, other, common.slot_mapping), other)):
                self.assertIsNotNone(made.nestedfp)
                out = self.run_layer(layer, made, query, cache)
                self.assert_attends(out, query, cache, table, positions, sequences, lambda p: p // 32 * 32)

    def test_microbatches(self):
        """A sequence may be cut between the two."""
        from vllm.v1.worker.ubatch_utils import maybe_create_ubatch_slices, split_attn_metadata

        builder, layer = self.made(self.attention.Backend)
        lengths, contexts = [1, 1, 1, 40, 7], [20, 50, 3, 90, 7]
        common, positions, sequences = self.batch(lengths, contexts)
        cache, query = self.cache(common.block_table_tensor), torch.randn(len(positions), HEADS, SIZE).half()
        slices, _ = maybe_create_ubatch_slices(True, np.array(lengths), len(positions), len(lengths), 2)
        out = torch.cat([self.run_layer(layer, builder.build(0, part), query[s.token_slice], cache)
                         for s, part in zip(slices, split_attn_metadata(slices, common))])
        self.assert_attends(out, query, cache, common.block_table_tensor, positions, sequences)

    def test_prompts_of_which_last_tokens_are_needed(self):
        """Of layers that share an earlier one's keys and values (Gemma 3n's fast prefill): all of them decode."""
        from vllm.v1.attention.backends.utils import create_fast_prefill_custom_backend

        builder, layer = self.made(create_fast_prefill_custom_backend("Fast", self.attention.Backend))
        common, positions, sequences = self.batch([1, 40, 7], [50, 90, 7])
        common.logits_indices_padded = wanted = common.query_start_loc[1:].long() - 1
        common.num_logits_indices = len(wanted)
        cache, query = self.cache(common.block_table_tensor), torch.randn(len(wanted), HEADS, SIZE).half()
        out = self.run_layer(layer, builder.build(0, common), query, cache)
        self.assertEqual(self.library.calls, [("decode", 3, 3)])
        self.assert_attends(out, query, cache, common.block_table_tensor, positions[wanted], sequences[wanted])

    def test_pooled_blocks(self):
        """Voxtral's encoder: four frames a token, blocks and steps four times as long."""
        from vllm.model_executor.models.whisper_causal import create_whisper_attention_backend_with_block_pooling

        frames = 4
        backend = create_whisper_attention_backend_with_block_pooling(self.attention.Backend, frames)
        builder, layer = self.made(backend, HEADS, HEADS, BLOCK * frames)
        common, positions, sequences = self.batch([1, 1, 5], [20, 50, 9])
        cache = self.cache(common.block_table_tensor, HEADS, BLOCK * frames)
        self.assertEqual(backend.get_kv_cache_shape(len(cache), BLOCK, HEADS * frames, SIZE, "auto"), tuple(cache.shape))
        query, key, value = torch.randn(3, len(positions) * frames, HEADS, SIZE).half()

        def update(_, key, value, cache, slots):
            for i, slot in enumerate(slots.tolist()):
                for which, new in enumerate((key, value)):
                    cache[slot // (BLOCK * frames), which, slot % (BLOCK * frames)] = new[i]

        with patch.object(self.attention.Impl, "do_kv_cache_update", staticmethod(update)):
            out = self.run_layer(layer, builder.build(0, common), query, cache, key, value)
        of_frames = (positions[:, None] * frames + np.arange(frames)).flatten()
        self.assert_attends(out, query, cache, common.block_table_tensor, of_frames, np.repeat(sequences, frames))

    def test_queries_that_see_all_keys_are_flash_attention_s(self):
        from vllm.model_executor.layers.attention.encoder_only_attention import create_encoder_only_attention_backend

        builder, _ = self.made(create_encoder_only_attention_backend(self.attention.Backend))
        common, *_ = self.batch([9, 30], [9, 30])
        with patch.object(self.attention.FlashAttentionMetadataBuilder, "build", lambda _, prefix, common, fast: common):
            self.assertFalse(builder.build(0, common).causal)


if __name__ == "__main__":
    unittest.main(verbosity=1)
