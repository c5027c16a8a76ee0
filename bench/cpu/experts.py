#!/usr/bin/env python3
"""Decode of mixtures of experts on the CPU beside what reading the weights a step needs would take.

usage: experts.py NESTEDFP [--repeats N] [--threads N] [--out FILE.json]

Random weights; `nestedfp bench` on each model with --machine, which also reads memory before and after each run of eight
steps: a shared machine reads at rates that change within seconds, and within a run is what a step is compared with. A
step's bytes are those of the experts that its tokens went to, of all other matrices, and of the embedding's rows; its
arithmetic is two operations a weight and row, at the rate of FP32 multiply-adds. Medians over the runs. Run it alone.
"""

import argparse
import json
import pathlib
import subprocess
import tempfile

MODELS = {
    # 8 experts of 100 M parameters in all, 2 for a token.
    "8x100M": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 1024, "intermediate_size": 4096,
        "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4, "num_local_experts": 8,
        "num_experts_per_tok": 2, "vocab_size": 4096, "max_position_embeddings": 4096},
    # Qwen3-30B-A3B's shape, a quarter of its width and six layers: 128 experts, 8 for a token.
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 1024,
        "intermediate_size": 3072, "moe_intermediate_size": 384, "num_hidden_layers": 6, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 64, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "vocab_size": 4096, "max_position_embeddings": 4096},
}


def bench(program, config, batches, repeats, threads):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        command = [program, "bench", path, "--load-format", "dummy", "--device", "cpu", "--batch", *map(str, batches),
                   "--prompt", "16", "--context", "8", "--generate", "9", "--repeats", str(repeats), "--threads", str(threads),
                   "--machine", "--json"]
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=0, help="0: as the program chooses")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=sorted(MODELS))
    parser.add_argument("--out")
    flags = parser.parse_args()
    figures = []
    print("| model | sequences | precision | step | of it experts | bytes | read at | arithmetic | above reading |\n"
          "| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in flags.models:
        run = bench(flags.program, MODELS[name], flags.batches, flags.repeats, flags.threads)
        fma = run["machine"]["fma_gflop_per_s"] * 1e9
        for row in run["rows"]:
            if row["test"] != "decode":
                continue
            figure = {"model": name, "batch": row["batch"], "precision": row["precision"], "step_ms": row["step_ms"],
                      "experts_ms": sum(row["stage_us"][name] for name in ("experts_gate/up", "experts_down")) / 1e3,
                      "bytes": sum(row["stage_weight_bytes"].values()), "read_gb_per_s": row["read_gb_per_s"],
                      "arithmetic_ms": row["gflop_per_s"] * row["step_ms"] * 1e9 / fma,
                      "above_reading": row["over_reading"] - 1}
            figures.append(figure)
            print("| {model} | {batch} | {precision} | {step_ms:.1f} ms | {experts_ms:.1f} ms | {0:.0f} MB | "
                  "{read_gb_per_s:.0f} GB/s | {arithmetic_ms:.1f} ms | {above_reading:.0%} |".format(
                      figure["bytes"] / 1e6, **figure), flush=True)
    if flags.out:
        pathlib.Path(flags.out).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
