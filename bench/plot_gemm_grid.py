#!/usr/bin/env python3
"""Draws what bench/gemm_grid wrote: heat maps of times over cuBLASLt's by shape and tokens, and a roofline.

    bench/plot_gemm_grid.py bench/results/gemm-h200.jsonl docs/gemm-h200.svg

Needs matplotlib. A black dot marks a cell where ours, alone for 100 ms, was held back by the power limit (as the driver
said). With --table the geometric means are printed as Markdown instead, without matplotlib.
"""

import argparse
import json
import math
import statistics
import sys

BANDS = [("m <= 64", lambda m: m <= 64), ("96..512", lambda m: 64 < m <= 512), (">= 1024", lambda m: m > 512), ("all", lambda m: True)]
FIGURES = [
    ("FP16 mode / cuBLASLt FP16", "nested_f16", "cublas_f16", "us"),
    ("the same without dependent launch", "nested_f16_no_pdl", "cublas_f16", "us"),
    ("E4M3, per-token scales / cuBLASLt E4M3 (its faster accumulation)", "nested_e4m3", "cublas_e4m3_fast", "us"),
    ("E4M3 promoted / cuBLASLt E4M3 without fast accumulation", "nested_e4m3_promoted", "cublas_e4m3", "us"),
    ("norm + quantisation + E4M3 GEMM / cuBLASLt E4M3 GEMM alone", "nested_e4m3_with_quant", "cublas_e4m3_fast", "us"),
    ("free join / biased join", "nested_f16_free_join", "nested_f16", "us"),
    ("untuned (analytic) / tuned", "nested_f16_analytic", "nested_f16", "us"),
    ("fixed cuts (batch-invariant) / tuned", "nested_f16_invariant", "nested_f16", "us"),
    ("each alone for 100 ms, FP16", "nested_f16", "cublas_f16", "sustained_us"),
    ("each alone for 100 ms, E4M3", "nested_e4m3", "cublas_e4m3_fast", "sustained_us"),
]
# An H200: dense FP16 and FP8 rates at 1.98 GHz (vendor's datasheet) and the read rate measured on one.
PEAKS = {"nested_f16": (989e12, 2), "nested_e4m3": (1979e12, 1)}
READ_BYTES = 4.45e12


def cells(path):
    out = []
    with open(path) as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except ValueError:
                sys.exit(f"{path}:{number}: not a line of JSON; is this what gemm_grid --out wrote?")
            if "nested_f16" in row:
                out.append(row)
    if not out:
        sys.exit(f"{path}: no cell with nested_f16; run gemm_grid without --methods")
    return out


def ratios(rows, ours, theirs, field, wanted):
    return [row[ours][field] / row[theirs][field] for row in rows
            if wanted(row["m"]) and row.get(ours, {}).get(field) and row.get(theirs, {}).get(field)]


def print_table(rows):
    print("| figure | " + " | ".join(name for name, _ in BANDS) + " |")
    print("| --- |" + " --- |" * len(BANDS))
    for label, ours, theirs, field in FIGURES:
        entries = []
        for _, wanted in BANDS:
            values = ratios(rows, ours, theirs, field, wanted)
            entries.append(f"{statistics.geometric_mean(values):.3f} ({max(values):.2f})" if values else "")
        print(f"| {label} | " + " | ".join(entries) + " |")


def draw(rows, path, title):
    try:
        import matplotlib
    except ImportError:
        sys.exit("plot_gemm_grid: matplotlib is missing; pip install matplotlib (or use --table)")
    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    plt.rcParams.update({"svg.hashsalt": "nestedfp", "svg.fonttype": "none", "font.size": 7})
    shapes = list(dict.fromkeys((row["n"], row["k"]) for row in rows))
    tokens = sorted({row["m"] for row in rows})
    by_place = {(row["n"], row["k"], row["m"]): row for row in rows}
    figure, axes = plt.subplots(3, 2, figsize=(11, 11.5))
    maps = [(0, 0, "us"), (2, 0, "us"), (0, 1, "sustained_us"), (2, 1, "sustained_us")]
    for (index, line, field), axis in zip(maps, [axes[0][0], axes[0][1], axes[1][0], axes[1][1]]):
        label, ours, theirs, _ = FIGURES[index]
        grid = [[math.nan] * len(tokens) for _ in shapes]
        for y, shape in enumerate(shapes):
            for x, m in enumerate(tokens):
                row = by_place.get((*shape, m), {})
                if row.get(ours, {}).get(field) and row.get(theirs, {}).get(field):
                    grid[y][x] = row[ours][field] / row[theirs][field]
                    axis.text(x, y, f"{grid[y][x]:.2f}", ha="center", va="center", fontsize=5)
                    if row[ours].get("power_limited"):
                        axis.plot(x + 0.36, y - 0.32, "k.", markersize=2)
        axis.imshow(grid, cmap="RdYlGn_r", vmin=0.8, vmax=1.3, aspect="auto")
        axis.set_xticks(range(len(tokens)), tokens, rotation=45)
        axis.set_yticks(range(len(shapes)), [f"{n} x {k}" for n, k in shapes])
        axis.set_title(label.split(" / ")[0] + (", in turns" if field == "us" else ", each alone for 100 ms"))
        axis.set_xlabel("tokens")
    for axis, (ours, theirs) in zip(axes[2], [("nested_f16", "cublas_f16"), ("nested_e4m3", "cublas_e4m3_fast")]):
        peak, width = PEAKS[ours]
        for method, marker in [(theirs, "x"), (ours, ".")]:
            points = []
            for row in rows:
                if row.get(method, {}).get("us"):
                    n, k, m = row["n"], row["k"], row["m"]
                    operations = 2 * n * k * m
                    moved = width * (n * k + m * k) + 2 * m * n
                    points.append((operations / moved, operations / row[method]["us"] / 1e6))
            axis.plot(*zip(*points), marker, markersize=4, label=method)
        x = [1, peak / READ_BYTES, 8000]
        axis.plot(x, [min(peak, READ_BYTES * i) / 1e12 for i in x], "k-", linewidth=0.7, label="datasheet rate, measured read rate")
        axis.set(xscale="log", yscale="log", xlabel="operations per byte of device memory", ylabel="TFLOP/s")
        axis.legend()
    figure.suptitle(title)
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    figure.savefig(path, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", help="what gemm_grid --out wrote")
    parser.add_argument("picture", nargs="?", help="file to write (.svg)")
    parser.add_argument("--table", action="store_true", help="print the table of docs/kernel-experiments.md")
    parser.add_argument("--title", default="Time over cuBLASLt's (below 1 is faster; dots: power-limited)")
    arguments = parser.parse_args()
    if not arguments.table and not arguments.picture:
        parser.error("name a picture to write, or ask for --table")
    rows = cells(arguments.results)
    if arguments.table:
        print_table(rows)
    if arguments.picture:
        draw(rows, arguments.picture, arguments.title)


if __name__ == "__main__":
    main()
