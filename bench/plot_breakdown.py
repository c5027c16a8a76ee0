#!/usr/bin/env python3
"""Draws where the time of a step goes: what `nestedfp bench MODEL latency --breakdown --json` wrote.

    nestedfp bench MODEL latency --batch 1 64 --input 1024 --output 16 --breakdown --json > breakdown.json
    bench/plot_breakdown.py breakdown.json docs/gpu-breakdown.svg
    bench/plot_breakdown.py bench/results/engine-h200.json docs/gpu-breakdown.svg --since "2026-11-22 11"

One bar a step; each stage's share of it, hatched as far as the least time that its bytes and its arithmetic allow
(where the file knows the device's limits; `--machine` measures a CPU's). Needs matplotlib. With --table the numbers are
printed as Markdown instead, without it.
"""

import argparse
import json
import sys

COLOURS = {
    "q/k/v": "#1f4e8c", "o": "#3b6fb6", "gate/up": "#5f93d6", "down": "#8fb8ec", "lm_head": "#2a8a9d",
    "linear": "#3b6fb6", "experts_gate/up": "#b64a3b", "experts_down": "#d97a6c", "experts": "#b64a3b",
    "shared_gate/up": "#8c3a6b", "shared_down": "#b86a98", "route": "#6b5bb0", "combine": "#d98fb0",
    "combine+rms_norm": "#d98fb0", "combine+rms_norm+round": "#d98fb0", "prefill_attention": "#d9822b",
    "decode_attention": "#efa95c", "rope+decode_attention": "#efa95c", "attention": "#d9822b", "rope": "#a35fa8",
    "rms_norm": "#5b9f62", "rms_norm+round": "#8cc492", "round": "#b7ddba", "activation": "#9aa84a",
    "activation+round": "#9aa84a", "add": "#3f7046", "embed": "#c2b24a", "gather_rows": "#4aa5ad",
    "sample": "#888888", "score": "#aaaaaa", "copy": "#cccccc"}


def steps(path, since):
    """(run, step) of a report, or of a file of results with several."""
    with open(path) as file:
        report = json.load(file)
    for run in report.get("runs", [report]):
        for step in run.get("breakdown", []):
            if run.get("date", "") >= since:
                yield run, step


def title(run, step):
    total = sum(s["us"] for s in step["stages"]) / 1e3
    name = f"{run['model'].rstrip('/').split('/')[-1]} {step['precision']}"
    if step["step"] == "prefill":
        return f"{name}: {step['batch']} prompt{'s' if step['batch'] > 1 else ''} of {step['input']}, {total:,.2f} ms"
    return f"{name}: decode, batch {step['batch']}, context {step['context']:.0f}, {total:,.2f} ms"


def least_us(stage):
    return stage["us"] * stage.get("share_of_limit", 0)


def table(path, since):
    columns = ["stage", "precision", "calls", "us", "share", "weights, MB", "activations, MB", "KV cache, MB", "GFLOP",
               "of its limit"]
    for run, step in steps(path, since):
        total = sum(s["us"] for s in step["stages"])
        source = run.get("limits", {}).get("source")
        print(f"\n{title(run, step)}{f'; limits: {source}' if source else ''}\n")
        print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
        for s in sorted(step["stages"], key=lambda s: -s["us"]):
            limit = f"{s['share_of_limit']:.0%} of {s.get('limited_by', 'it')}" if "share_of_limit" in s else ""
            sizes = [s.get(kind, 0) / 1e6 for kind in ("weight_bytes", "activation_bytes", "kv_bytes")]
            cells = [s["stage"], s.get("precision", ""), f"{s['calls']:.0f}", f"{s['us']:.1f}",
                     f"{s['us'] / total:.1%}",
                     *(f"{size:,.1f}" for size in sizes), f"{s['flops'] / 1e9:,.1f}", limit]
            print(f"| {' | '.join(cells)} |")


def draw(path, out, since):
    import matplotlib
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "nestedfp"  # the same file for the same numbers
    import matplotlib.pyplot as plt
    found = list(steps(path, since))
    if not found:
        sys.exit(f"{path}: no run has a breakdown; make one with nestedfp bench MODEL latency --breakdown --json")
    height = 1.1 * len(found) + 1.4
    figure, axes = plt.subplots(len(found), 1, figsize=(9, height), squeeze=False)
    for axis, (run, step) in zip(axes[:, 0], found):
        left = 0.0
        for s in sorted(step["stages"], key=lambda s: -s["us"]):
            width = s["us"] / 1e3
            colour = COLOURS.get(s["stage"], "#000000")
            axis.barh(0, width, left=left, color=colour, label=s["stage"], edgecolor="white", linewidth=0.3)
            axis.barh(0, min(width, least_us(s) / 1e3), left=left, color=colour, hatch="///", edgecolor="white",
                      linewidth=0)
            left += width
        axis.set_title(title(run, step), fontsize=9, loc="left")
        axis.set_yticks([])
        axis.set_xlim(0, left)
        axis.tick_params(labelsize=7)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
    sources = {run["limits"]["source"] for run, _ in found if "limits" in run}
    hatched = f"; hatched: the least that bytes and arithmetic allow ({', '.join(sorted(sources))})" if sources else ""
    axes[-1, 0].set_xlabel(f"ms{hatched}", fontsize=8)
    names = {}
    for axis in axes[:, 0]:
        for handle, name in zip(*axis.get_legend_handles_labels()):
            names.setdefault(name, handle)
    names = {name: names[name] for name in [*COLOURS, *names] if name in names}
    figure.legend(names.values(), names.keys(), ncol=6, loc="upper center", fontsize=7, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.7 / height))
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
