"""How far the latency policy is behind always-FP8, and how much it computes in FP16, over many parts of traces: one thinning of
one trace says little near the machine's limit, where a few requests more or less are lost by chance.

    parts.py NESTEDFP STEP_TIMES TRACES OUT.json [REPLAY FLAGS...]

TRACES is the folder of the Azure traces (azure-llm-2024-conv-20min.csv, azure-llm-2023-conv.csv). Ten parts of 1000 requests each,
three times with different seeds: the 2024 conversation trace from its start (three), from 300, 600 and 900 s on, the 2023 one
(two), and made-up bursts (gamma-distributed gaps with a coefficient of variation of 2 and 3, log-normal lengths with medians of
350 and 180 tokens). REPLAY FLAGS go to `nestedfp replay`, for example --table-model and --table-scale."""

import datetime
import json
import math
import os
import random
import statistics
import subprocess
import tempfile

import record

RATES = [1.99, 5.03, 7.47, 10.5, 12.0]
SEEDS = 3


def later(source, out, seconds):
    """The rows of an Azure trace from so many seconds on."""
    with open(source, encoding="utf-8") as f:
        head, *rows = f.read().splitlines()
    at = lambda row: datetime.datetime.fromisoformat(row.split(",")[0]).timestamp()
    begin = at(rows[0])
    with open(out, "w", encoding="utf-8") as f:
        f.write("\n".join([head, *(row for row in rows if at(row) - begin >= seconds)]) + "\n")
    return out


def bursts(out, variation, seed):
    numbers, now = random.Random(seed), 0.0
    shape = 1 / variation**2
    start = datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)
    with open(out, "w", encoding="utf-8") as f:
        f.write("TIMESTAMP,ContextTokens,GeneratedTokens\n")
        for _ in range(1000):
            now += numbers.gammavariate(shape, 1 / shape)
            prompt, answer = (max(1, min(most, int(numbers.lognormvariate(math.log(median), sigma))))
                              for most, median, sigma in ((8000, 350, 1.2), (2000, 180, 0.8)))
            f.write(f"{(start + datetime.timedelta(seconds=now)).isoformat()},{prompt},{answer}\n")
    return out


def main():
    program, table, traces, out, *flags = record.arguments(__doc__, 4)
    record.check(out)
    y24, y23 = (os.path.join(traces, name) for name in ("azure-llm-2024-conv-20min.csv", "azure-llm-2023-conv.csv"))
    runs = {}
    with tempfile.TemporaryDirectory() as folder:
        path = lambda name: os.path.join(folder, name)
        after = {s: later(y24, path(f"after{s}.csv"), s) for s in (300, 600, 900)}
        parts = [(f"2024 {i}", lambda seed, i=i: (y24, 10 * i + seed)) for i in (1, 2, 3)]
        parts += [(f"2024 from {s} s", lambda seed, s=s: (after[s], seed)) for s in after]
        parts += [(f"2023 from {s} s", lambda seed, s=s: (later(y23, path("late.csv"), s + 200 * seed), seed)) for s in (0, 1500)]
        parts += [(f"bursts, variation {v}", lambda seed, v=v: (bursts(path("bursts.csv"), v, 10 * v + seed), seed)) for v in (2, 3)]
        for name, make in parts:
            for seed in range(1, SEEDS + 1):
                trace, number = make(seed)
                subprocess.run([program, "replay", trace, "--simulate", table, "--requests", "1000", "--seed", str(number), "--policies", "slo",
                                "slo-fp8", "--rate", *map(str, RATES), *flags, "--json", path("r.json")], check=True, capture_output=True)
                with open(path("r.json"), encoding="utf-8") as f:
                    rows = json.load(f)["rows"]
                for i, rate in enumerate(RATES):
                    runs.setdefault(rate, {}).setdefault(name, []).append(rows[2 * i:2 * i + 2])
    result = []
    for rate, of in runs.items():
        every = [pair for pairs in of.values() for pair in pairs]
        mean = lambda which, name: statistics.mean(pair[which][name] for pair in every)
        behind = {name: [100 * (fp8["attainment_tight"] - slo["attainment_tight"]) for slo, fp8 in pairs] for name, pairs in of.items()}
        furthest = max(behind, key=lambda name: statistics.mean(behind[name]))
        result.append({"rate": rate, "slo": [mean(0, "attainment_tight"), mean(0, "attainment_loose")],
                       "slo_fp8": [mean(1, "attainment_tight"), mean(1, "attainment_loose")], "fp16": mean(0, "fp16_token_share"),
                       "least_fp16": min(slo["fp16_token_share"] for slo, _ in every), "longest_wait_s": max(slo["ttft_s"]["max"] for slo, _ in every),
                       "behind_points": {name: statistics.mean(points) for name, points in behind.items()},
                       "furthest_behind": furthest, "furthest_behind_points": statistics.mean(behind[furthest]),
                       "worst_run_points": max(max(points) for points in behind.values())})
        row = result[-1]
        print(f"{rate:5}: slo {100 * row['slo'][0]:.1f} / {100 * row['slo'][1]:.1f}, slo-fp8 {100 * row['slo_fp8'][0]:.1f} / {100 * row['slo_fp8'][1]:.1f}, "
              f"FP16 {100 * row['fp16']:.0f} %, furthest behind {row['furthest_behind_points']:.1f} ({furthest}), worst of all runs {row['worst_run_points']:.1f}", flush=True)
    with open(out, "w", encoding="utf-8") as f:
        json.dump({"what": __doc__.split("\n\n")[0], "flags": flags, "seeds": SEEDS, "rates": result}, f, indent=1)


if __name__ == "__main__":
    main()
