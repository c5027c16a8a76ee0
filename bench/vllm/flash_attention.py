"""flash_attention.py: microseconds and TFLOP/s of FlashAttention 3 as vLLM calls it for prompts (paged FP16 cache, blocks of 16
tokens in random places, causal, 32 heads, 8 KV heads), a JSON line a shape. The shapes are those of attention_bench prompts,
and likewise each call has another part of a cache that the L2 does not hold."""

import json
import statistics

import torch
from vllm.vllm_flash_attn import flash_attn_varlen_func

HEADS, KV_HEADS, BLOCK, L2_BYTES = 32, 8, 16, 160 << 20
SHAPES = ((1, 1024, 128), (8, 1024, 128), (1, 2048, 128), (1, 4096, 128), (1, 8192, 128), (1, 16384, 128), (1, 8192, 64),
          (1, 8192, 256))


def microseconds(prompts: int, tokens: int, head_dim: int, rounds: int = 20, calls: int = 4) -> float:
    random = torch.Generator(device="cuda").manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.float16, generator=random)

    blocks = prompts * tokens // BLOCK
    copies = L2_BYTES // (blocks * BLOCK * KV_HEADS * head_dim * 4) + 1
    caches = [(normal(blocks, BLOCK, KV_HEADS, head_dim), normal(blocks, BLOCK, KV_HEADS, head_dim)) for _ in range(copies)]
    q = normal(prompts * tokens, HEADS, head_dim)
    out = torch.empty_like(q)
    table = torch.randperm(blocks, device="cuda", generator=random).to(torch.int32).view(prompts, -1)
    starts = torch.arange(prompts + 1, device="cuda", dtype=torch.int32) * tokens
    lengths = torch.full((prompts,), tokens, device="cuda", dtype=torch.int32)

    def run(call: int) -> None:
        keys, values = caches[call % copies]
        flash_attn_varlen_func(q=q, k=keys, v=values, out=out, cu_seqlens_q=starts, max_seqlen_q=tokens, max_seqlen_k=tokens,
                               seqused_k=lengths, softmax_scale=0.1, causal=True, block_table=table, fa_version=3)

    for call in range(calls):
        run(call)
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for call in range(calls):
            run(call)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def main() -> None:
    for prompts, tokens, head_dim in SHAPES:
        us = microseconds(prompts, tokens, head_dim)
        operations = 4.0 * prompts * HEADS * head_dim * tokens * (tokens + 1) / 2
        print(json.dumps({"kernel": "flash_attention_3", "sequences": prompts, "queries": tokens, "head_dim": head_dim,
                          "us": round(us, 2), "tflop_s": round(operations / us * 1e-6, 1)}), flush=True)


if __name__ == "__main__":
    main()
