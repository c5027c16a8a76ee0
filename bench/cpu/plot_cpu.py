#!/usr/bin/env python3
"""Draws what compare_llama.py measured: decode tokens/s by batch and precision with the machine's ceilings, and prefill.

    bench/cpu/plot_cpu.py bench/results/cpu-llama.json docs/cpu-speed.svg

Needs matplotlib.
"""

import json
import sys

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "nestedfp"  # the same bytes for the same figures
matplotlib.rcParams["svg.fonttype"] = "none"
import matplotlib.pyplot as plt  # noqa: E402

COLOURS = {"fp16": "#1f5fa8", "fp8": "#c8611a", "fp8, head too": "#e8a33d"}


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    with open(sys.argv[1], encoding="utf-8") as file:
        report = json.load(file)
    machine = report["machine"]
    decode = [row for row in report["nestedfp"] if row["test"] == "decode"]
    prefill = [row for row in report["nestedfp"] if row["test"] == "prefill"]
    peers = {(row["test"], row["file"]): row["tokens_per_s"] for row in report["peer"]["rows"]}

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=[2, 1], layout="constrained")
    for precision in ("fp16", "fp8"):
        rows = sorted((row for row in decode if row["precision"] == precision), key=lambda row: row["batch"])
        batches = [row["batch"] for row in rows]
        left.plot(batches, [row["tokens_per_s"] for row in rows], "o-", color=COLOURS[precision],
                  label=f"nestedfp {precision}")
        # What a step reads and computes bounds it: bytes over the bandwidth, operations over the FMA rate.
        numbers, key = "FP32", "fma_gflop_per_s"
        if precision == "fp8" and "avx512fp16" in report["device"]:
            numbers, key = "FP16", "fp16_gflop_per_s"
        elif precision == "fp8" and "amx" in report["device"]:
            numbers, key = "AMX", "tile_gflop_per_s"
        rate = machine[key]
        bound = [min(machine["read_gb_per_s"] * row["tokens_per_s"] / row["weight_gb_per_s"],
                     rate * row["tokens_per_s"] / row["gflop_per_s"]) for row in rows]
        left.plot(batches, bound, "--", color=COLOURS[precision], linewidth=1,
                  label=f"ceiling, {precision}: memory read, then {numbers} arithmetic")
    for kind, marker in (("F16", "s"), ("Q8_0", "^"), ("BF16", "v")):
        left.plot([1], [peers["decode", kind]], marker, color="#444444", label=f"llama.cpp {kind}", linestyle="none")
    left.set_xscale("log", base=2)
    left.set_yscale("log", base=2)
    left.set_xticks(batches, batches)
    left.set_yticks([64, 128, 256, 512, 1024, 2048], [64, 128, 256, 512, 1024, 2048])
    left.set_xlabel("sequences decoded together")
    left.set_ylabel("tokens/s, all sequences")
    left.set_title("decode")
    left.legend(fontsize=8)

    bars = [(f"nestedfp\n{row['precision']}", row["tokens_per_s"], COLOURS[row["precision"]]) for row in prefill
            if row["precision"] in ("fp16", "fp8")]
    bars += [(f"llama.cpp\n{kind}", peers["prefill", kind], "#888888") for kind in ("F16", "Q8_0", "BF16")]
    right.bar([bar[0] for bar in bars], [bar[1] for bar in bars], color=[bar[2] for bar in bars])
    flops = next(row["gflop_per_s"] / row["tokens_per_s"] for row in prefill if row["precision"] == "fp16")
    right.axhline(machine["fma_gflop_per_s"] / flops, linestyle="--", linewidth=1, color="#1f5fa8")
    right.annotate("FP32 arithmetic", (0, machine["fma_gflop_per_s"] / flops), fontsize=8, va="bottom", ha="left")
    right.tick_params(axis="x", labelsize=7)
    right.set_ylabel("tokens/s")
    right.set_title(f"prefill of {report['prompt']} tokens")
    figure.suptitle(f"{report['model']}, {report['device']}, {report['date']}", fontsize=9)
    figure.savefig(sys.argv[2], metadata={"Date": None})


if __name__ == "__main__":
    main()
