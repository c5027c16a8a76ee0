#!/usr/bin/env python3
"""Draws where the time of a step goes: what `nestedfp bench MODEL latency --breakdown --json` wrote on a GPU.

    bench/plot_breakdown.py bench/results/engine-h200.json docs/gpu-breakdown.svg --since "2026-11-22 11"

One bar a step; each operation's share, and beside it the least time that its bytes and its arithmetic allow. Needs
matplotlib. With --table the numbers are printed as Markdown instead, without it.
"""

import argparse
import json
import sys

# One H200: bytes/s read by a kernel that does nothing else (measured), dense FLOP/s of the data sheet.
READ_BYTES = 4.45e12
FLOPS = {"fp16": 989e12, "fp8": 989e12, "fp8-w8a8": 1979e12}
COLOURS = {"linear": "#3b6fb6", "attention": "#d9822b", "rms_norm": "#5b9f62", "rope": "#a35fa8", "sample": "#888888",
           "embed": "#c2b24a", "gather_rows": "#4aa5ad", "experts": "#b64a3b", "route": "#6b5bb0", "combine": "#d98fb0"}


def steps(path, since):
    with open(path) as file:
        report = json.load(file)
    for run in report["runs"]:
        for step in run.get("breakdown", []):
            if run.get("date", "") >= since:
                yield run["model"], step


def title(model, step):
    if step["step"] == "prefill":
        return f"{model} {step['precision']}: {step['batch']} prompt{'s' if step['batch'] > 1 else ''} of {step['input']}"
    return f"{model} {step['precision']}: decode, batch {step['batch']}, context {step['context']:.0f}"


def least_us(stage, precision):
    """What the data sheet's arithmetic and the measured read rate allow; attention computes in FP16."""
    peak = FLOPS[precision] if stage["stage"] in ("linear", "experts") else FLOPS["fp16"]
    return max((stage["weight_bytes"] + stage["kv_bytes"]) / READ_BYTES, stage["flops"] / peak) * 1e6


def table(path, since):
    for model, step in steps(path, since):
        total = sum(s["us"] for s in step["stages"])
        print(f"\n{title(model, step)}: {total:.0f} us\n")
        print("| operation | calls | us | share | GB | TFLOP | share of the limit |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for s in sorted(step["stages"], key=lambda s: -s["us"]):
            least = least_us(s, step["precision"])
            limit = f"{least / s['us']:.0%}" if least > 0 else ""
            size = (s["weight_bytes"] + s["kv_bytes"]) / 1e9
            print(f"| {s['stage']} | {s['calls']:.0f} | {s['us']:.0f} | {s['us'] / total:.1%} | {size:.2f} | {s['flops'] / 1e12:.2f} | {limit} |")


def draw(path, out, since):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    all_steps = list(steps(path, since))
    if not all_steps:
        sys.exit(f"{path}: no run has a breakdown")
    figure, axes = plt.subplots(len(all_steps), 1, figsize=(9, 1.1 * len(all_steps) + 0.8), squeeze=False)
    for axis, (model, step) in zip(axes[:, 0], all_steps):
        left = 0.0
        for s in sorted(step["stages"], key=lambda s: -s["us"]):
            width = s["us"] / 1e3
            colour = COLOURS.get(s["stage"], "#bbbbbb")
            axis.barh(0, width, left=left, color=colour, label=s["stage"])
            axis.barh(0, min(width, least_us(s, step["precision"]) / 1e3), left=left, color=colour, hatch="///",
                      edgecolor="white", linewidth=0)
            left += width
        axis.set_title(title(model, step), fontsize=9, loc="left")
        axis.set_yticks([])
        axis.set_xlim(0, left)
        axis.tick_params(labelsize=7)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
    axes[-1, 0].set_xlabel("ms; hatched: the least that bytes and arithmetic allow", fontsize=8)
    names = {}
    for axis in axes[:, 0]:
        for handle, name in zip(*axis.get_legend_handles_labels()):
            names.setdefault(name, handle)
    figure.legend(names.values(), names.keys(), ncol=6, loc="upper center", fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    figure.savefig(out, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results")
    parser.add_argument("svg", nargs="?")
    parser.add_argument("--since", default="", help="only of runs from this date on, as the results write it")
    parser.add_argument("--table", action="store_true", help="Markdown to standard output")
    args = parser.parse_args()
    if args.table:
        table(args.results, args.since)
    elif args.svg is None:
        parser.error("say where to draw to, or --table")
    else:
        draw(args.results, args.svg, args.since)


if __name__ == "__main__":
    main()
