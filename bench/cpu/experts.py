#!/usr/bin/env python3
"""Decode of mixtures of experts on the CPU beside what reading the weights a step needs would take.

usage: experts.py NESTEDFP [--rounds N] [--threads N] [--out FILE.json]

Random weights; each round is `nestedfp bench` on each model with --machine, and the least step of all rounds counts, as
the machine's rates are the best of theirs. A step's bytes are those of the experts that its tokens went to, of all
other matrices, and of the embedding's rows; its arithmetic is two operations a weight and row. Run it alone, with a
high priority.
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


def bench(program, config, batches, threads):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        command = [program, "bench", path, "--load-format", "dummy", "--device", "cpu", "--batch", *map(str, batches),
                   "--prompt", "16", "--context", "16", "--generate", "16", "--repeats", "3", "--threads", str(threads),
                   "--machine", "--json"]
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=0, help="0: as the program chooses")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=sorted(MODELS))
    parser.add_argument("--out")
    flags = parser.parse_args()
    figures = []
    print("| model | sequences | precision | step | of it experts | reading | arithmetic | above reading | above the "
          "larger |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in flags.models:
        runs = [bench(flags.program, MODELS[name], flags.batches, flags.threads) for _ in range(flags.rounds)]
        read = max(run["machine"]["read_gb_per_s"] for run in runs) * 1e9
        fma = max(run["machine"]["fma_gflop_per_s"] for run in runs) * 1e9
        for i, row in enumerate(runs[0]["rows"]):
            if row["test"] != "decode":
                continue
            best = min((run["rows"][i] for run in runs), key=lambda r: r["step_ms"])
            step = best["step_ms"]
            bytes_read = sum(best["stage_weight_bytes"].values())
            reading = bytes_read / read * 1e3
            arithmetic = best["gflop_per_s"] * 1e9 * step * 1e-3 / fma * 1e3
            experts = best["stage_us"]["expert_linear"] / 1e3
            figures.append({"model": name, "batch": row["batch"], "precision": row["precision"], "step_ms": step,
                            "experts_ms": experts, "bytes": bytes_read, "reading_ms": reading,
                            "arithmetic_ms": arithmetic, "read_gb_per_s": read / 1e9, "fma_gflop_per_s": fma / 1e9})
            print(f"| {name} | {row['batch']} | {row['precision']} | {step:.1f} ms | {experts:.1f} ms | "
                  f"{bytes_read / 1e6:.0f} MB, {reading:.1f} ms | {arithmetic:.1f} ms | {step / reading - 1:.0%} | "
                  f"{step / max(reading, arithmetic) - 1:.0%} |", flush=True)
        print(f"\n{name}: the machine reads {read / 1e9:.1f} GB/s and makes {fma / 1e9:.0f} GFLOP/s (FP32)\n", flush=True)
    if flags.out:
        pathlib.Path(flags.out).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
