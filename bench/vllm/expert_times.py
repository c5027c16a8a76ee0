"""expert_times.py [--out FILE] [--rows 1,8,32,...] [--kernels]: a mixture's experts, from the router's choice to their sum, in
microseconds: nestedfp's and vLLM's own (Triton), FP16 and FP8, from CUDA graphs of several calls with routes of their own,
so that weights come from memory. One JSON object a line. --kernels: also what each of nestedfp's kernels takes."""

import argparse
import json
import statistics

import torch
from nestedfp import _library
from nestedfp.vllm import experts, op
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

# name: hidden, intermediate, experts, of a token
SHAPES = {"qwen3-30b-a3b": (2048, 768, 128, 8), "olmoe-7b": (2048, 1024, 64, 8), "mixtral-8x7b": (4096, 14336, 8, 2)}
CALLS = 6  # of a graph


def graph_of(call, inputs):
    """Microseconds of one call."""
    call(*inputs[0])  # warms up, outside of the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call(*given) for given in inputs]

    def run() -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / len(inputs)

    run()
    return run, (graph, kept)


def kernels_of(call, inputs) -> dict:
    """Microseconds of each kernel of a call, by name."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(4):
            for given in inputs:
                call(*given)
        torch.cuda.synchronize()
    times = {event.key[:60]: round(event.device_time_total / event.count, 2) for event in found.key_averages()
             if event.device_time_total > 0}
    return dict(sorted(times.items(), key=lambda item: -item[1])[:8])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="expert_times.jsonl")
    parser.add_argument("--rows", default="1,8,32,128,512,2048,8192")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--kernels", action="store_true")
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    sink = open(arguments.out, "w")
    generator = torch.Generator(device="cuda")
    generator.manual_seed(1)

    def draw(*shape, sigma=1.0):
        out = torch.empty(shape, dtype=dtype, device="cuda")
        return out.normal_(0, sigma, generator=generator)

    for name in arguments.shapes.split(","):
        hidden, inter, count, top = SHAPES[name]
        w13, w2 = draw(count, 2 * inter, hidden, sigma=0.02), draw(count, hidden, inter, sigma=0.02)
        nested = experts.Mixture(experts.nest(w13, True), experts.nest(w2, False), _library.SILU)
        scales = [w.abs().amax((1, 2)).float() / 448 for w in (w13, w2)]
        low = [(w.float() / s[:, None, None]).to(torch.float8_e4m3fn) for w, s in zip((w13, w2), scales)]
        quantised = fp8_w8a8_moe_quant_config(*scales)

        def ours(precision):
            def call(x, weights, ids):
                op.Step.forced = precision
                return nested.run(x, weights, ids)
            return call

        calls = {"vllm fp16": lambda x, weights, ids: fused_experts(x, w13, w2, weights, ids),
                 "nestedfp fp16": ours(_library.FP16),
                 "vllm fp8": lambda x, weights, ids: fused_experts(x, *low, weights, ids, quant_config=quantised),
                 "nestedfp fp8": ours(_library.FP8)}
        for rows in map(int, arguments.rows.split(",")):
            inputs = []
            for _ in range(CALLS):
                logits = torch.rand(rows, count, device="cuda", generator=generator)
                weights, ids = torch.softmax(logits, 1).topk(top, 1)
                inputs.append((draw(rows, hidden), weights.float(), ids.to(torch.int32)))
            measured = {mode: graph_of(call, inputs) for mode, call in calls.items()}
            times = {mode: [] for mode in calls}
            for _ in range(9):  # in turn
                for mode, (run, _) in measured.items():
                    times[mode].append(run())
            medians = {mode: round(statistics.median(values), 2) for mode, values in times.items()}
            line = {"shape": name, "dtype": arguments.dtype, "rows": rows, **medians,
                    "ratios": {mode: round(medians[f"nestedfp {mode}"] / medians[f"vllm {mode}"], 3) for mode in ("fp16", "fp8")},
                    "tflops": {mode: round(rows * top * 6 * hidden * inter / us / 1e6, 1) for mode, us in medians.items()}}
            if arguments.kernels and rows in (1, 32, 2048):
                line["kernels"] = {mode: kernels_of(calls[mode], inputs) for mode in calls if "nestedfp" in mode or rows == 32}
            print("JSON", json.dumps(line), flush=True)
            sink.write(json.dumps(line) + "\n")
            sink.flush()
            del measured
        del nested, w13, w2, low
        torch.cuda.empty_cache()


if __name__ == "__main__":
    with set_current_vllm_config(VllmConfig()):
        main()
