#!/usr/bin/env python3
"""Speed of `nestedfp bench` beside llama.cpp's `llama-bench`, on the same machine, threads and model, in one run.

The programs take turns, round after round, so that what else the machine does hits both; medians over the rounds are
kept, also of the shares of what the machine can do, which each run measures for itself. llama.cpp's F16, BF16 and Q8_0 files are made from MODEL by its own llama-quantize.

    bench/cpu/compare_llama.py --nestedfp build/release/apps/nestedfp --llama BUILD/bin --model MODEL.gguf \
        --rounds 5 --out bench/results/cpu-llama.json

FP8 is measured as this machine computes it: on FP16 multiply-adds where the processor has them (share_of_fp16_fma is of their rate), in
FP32 elsewhere and with --kernels avx512gfni.

Needs a llama.cpp build with llama-bench and llama-quantize (-DBUILD_SHARED_LIBS=OFF); nothing but Python's own library.
"""

import argparse
import datetime
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile


def cpu():
    name, flags = "", []
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and not name:
            name = value.strip()
        if key.strip() == "flags" and not flags:
            flags = [f for f in value.split() if f.startswith(("avx", "fma", "f16c", "gfni", "amx"))]
    return {"model": name, "flags": flags, "cpus": len(os.sched_getaffinity(0))}


def run(command, environment=None):
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(environment or {})})
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def quantise(tools, model, folder, kind):
    path = pathlib.Path(folder) / f"{kind}.gguf"
    command = [tools / "llama-quantize", "--allow-requantize", model, path, kind]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"llama-quantize to {kind} failed:\n{done.stderr[-2000:]}")
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nestedfp", required=True, type=pathlib.Path, help="the nestedfp program")
    parser.add_argument("--llama", required=True, type=pathlib.Path, help="folder with llama-bench and llama-quantize")
    parser.add_argument("--model", required=True, type=pathlib.Path, help="a GGUF file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--generate", type=int, default=128)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 12, 16, 32, 64], help="of nestedfp's decode")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kernels", default="", help="NESTEDFP_CPU, e.g. avx2 to compare with an AVX2 llama.cpp")
    parser.add_argument("--llama-name", default="llama.cpp", help="what the build is, for the record")
    parser.add_argument("--out", required=True, type=pathlib.Path)
    options = parser.parse_args()

    environment = {"NESTEDFP_CPU": options.kernels} if options.kernels else {}
    ours, theirs, first = {}, {}, None
    with tempfile.TemporaryDirectory() as folder:
        files = {kind: quantise(options.llama, options.model, folder, kind) for kind in ("F16", "BF16", "Q8_0")}
        for round_ in range(options.rounds):
            print(f"round {round_ + 1} of {options.rounds}", file=sys.stderr)
            base = [options.nestedfp, "bench", options.model, "--threads", str(options.threads), "--prompt",
                    str(options.prompt), "--context", "1", "--generate", str(options.generate), "--repeats", "1",
                    "--json", "--machine"]
            result = run(base + ["--batch", *map(str, options.batch)], environment)
            first = first or result
            head = run(base + ["--batch", "1", "--precisions", "fp8", "--fp8-head"], environment)
            for row in head["rows"]:
                row["precision"] = "fp8, head too"
            for row in result["rows"] + head["rows"]:
                ours.setdefault((row["test"], row["precision"], row["batch"]), []).append((row, result["machine"]))
            for kind, path in files.items():
                rows = run([options.llama / "llama-bench", "-m", path, "-p", str(options.prompt), "-n",
                            str(options.generate), "-t", str(options.threads), "-r", "1", "-o", "json"])
                for row in rows:
                    test = "prefill" if row["n_prompt"] else "decode"
                    theirs.setdefault((test, kind), []).append(row["avg_ts"])

    machines = [machine for runs in ours.values() for _, machine in runs]
    machine = {key: statistics.median(m[key] for m in machines) for key in first["machine"]}
    rows = []
    for (test, precision, batch), runs in ours.items():
        def median(of):
            return statistics.median(of(row, ceilings) for row, ceilings in runs)
        rows.append({"test": test, "precision": precision, "batch": batch,
                     "tokens_per_s": median(lambda row, _: row["tokens_per_s"]),
                     "weight_gb_per_s": median(lambda row, _: row["weight_gb_per_s"]),
                     "gflop_per_s": median(lambda row, _: row["gflop_per_s"]),
                     # Of the ceilings that the same process measured, right after.
                     "share_of_read": median(lambda row, m: row["weight_gb_per_s"] / m["read_gb_per_s"]),
                     "share_of_fma": median(lambda row, m: row["gflop_per_s"] / m["fma_gflop_per_s"]),
                     "share_of_fp16_fma": median(lambda row, m: row["gflop_per_s"] / m["fp16_gflop_per_s"])
                     if machine["fp16_gflop_per_s"] else None,
                     "share_of_bf16_dot": median(lambda row, m: row["gflop_per_s"] / m["bf16_dot_gflop_per_s"])
                     if machine["bf16_dot_gflop_per_s"] else None})
    peers = [{"test": test, "file": kind, "batch": 1, "tokens_per_s": statistics.median(values)}
             for (test, kind), values in theirs.items()]
    report = {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu(),
        "command": "bench/cpu/compare_llama.py --model " + options.model.name + f" --threads {options.threads}"
                   f" --rounds {options.rounds}" + (f" --kernels {options.kernels}" if options.kernels else ""),
        "model": options.model.name,
        "device": first["device"],
        "prompt": options.prompt,
        "generate": options.generate,
        "machine": machine,
        "nestedfp": rows,
        "peer": {"name": options.llama_name, "rows": peers},
    }
    temporary = options.out.with_suffix(".tmp")
    temporary.write_text(json.dumps(report, indent=1) + "\n")
    temporary.replace(options.out)

    print(f"{report['device']}; reads {machine['read_gb_per_s']:.1f} GB/s, FP32 {machine['fma_gflop_per_s']:.0f} "
          f"GFLOP/s, BF16 {machine['bf16_dot_gflop_per_s']:.0f} GFLOP/s")
    for row in rows:
        print(f"nestedfp  {row['test']:<8} {row['precision']:<14} {row['batch']:>3} {row['tokens_per_s']:>9.1f} tokens/s "
              f"{row['weight_gb_per_s']:>6.1f} GB/s ({row['share_of_read']:.0%}) {row['gflop_per_s']:>7.1f} GFLOP/s "
              f"({row['share_of_fma']:.0%})")
    for row in peers:
        print(f"llama.cpp {row['test']:<8} {row['file']:<14} {row['batch']:>3} {row['tokens_per_s']:>9.1f} tokens/s")


if __name__ == "__main__":
    main()
