"""The latency policy on a real machine: a burst played against it and against FP16 first come, the same simulated, and a
long prompt beside running streams.

    slo.py NESTEDFP MODEL OUT.json [PARTS] [--trace AZURE.csv]

PARTS (default: long,burst,trace): `long` is a prompt of 3,900 tokens beside four streams, `burst` the made-up bursts of
burst.csv (gamma-distributed gaps with a coefficient of variation of 2.5, log-normal lengths), `trace` a part of an Azure
trace (--trace). Default flags; all servers predict from the table that the first one measured. Simulated twice: from the table
alone, and with steps as much longer than the table's and as uneven as those of the real run were ("as slow"). Everything takes some
eight minutes on two cores with the demo model. What other programs computed meanwhile is reported (`others_cpus`)."""

import argparse
import asyncio
import csv
import json
import os
import random
import re
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.request

import record

LONG, STREAMS = 3900, 4
# Continued in words, an event each: of random tokens two or three would make a character, and come together.
STORY = "Once upon a time there was a girl who lived in a small house near the sea. One day number {} she went out and"
BURST = os.path.join(os.path.dirname(os.path.abspath(__file__)), "burst.csv")
TRACE = {"requests": 80, "rate": 0.7, "most_tokens": 2000, "seed": 1}


def prediction(steps):
    """Errors of predictions, and beside them what steps differ from an equal one right before: no prediction can be better
    than about that."""
    def summary(errors):
        errors = sorted(errors)
        return {"steps": len(errors), "mean_error": sum(errors) / len(errors), "p95": errors[int(0.95 * (len(errors) - 1))],
                "within_12_percent": sum(e <= 0.12 for e in errors) / len(errors)} if errors else None

    def kind(step):
        return (step["precision"], step["fp8_share"], step["tokens"], step["prefill_tokens"], step["sequences"])

    ms = [float(step["ms"]) for step in steps]
    alike = [abs(ms[i - 1] - ms[i]) / ms[i] for i in range(1, len(steps)) if kind(steps[i]) == kind(steps[i - 1])
             and float(steps[i]["prefill_pairs"]) <= 1.05 * float(steps[i - 1]["prefill_pairs"])]
    predicted = [(float(step["predicted_ms"]), t) for step, t in zip(steps, ms)]
    return {**(summary([abs(p - t) / t for p, t in predicted if p > 0]) or {}), "alike_in_turn": summary(alike)}


class Server:
    keep_steps, kept = None, 0

    def __init__(self, program, model, cache, *flags):
        self.step_log = os.path.join(cache, "steps.csv")
        self.process = subprocess.Popen([program, "serve", model, "--port", "0", "--served-model-name", "m",
                                         "--disable-log-requests", "--step-log", self.step_log, *flags],
                                        stderr=subprocess.PIPE, text=True,
                                        env={**os.environ, "XDG_CACHE_HOME": cache})
        self.says = []
        for line in self.process.stderr:
            self.says.append(line.rstrip())
            if found := re.search(r"ready .*http://[^ ]*:(\d+) ", line):
                self.port = int(found.group(1))
                break
        else:
            raise RuntimeError("\n".join(self.says))
        threading.Thread(target=lambda: [None for _ in self.process.stderr], daemon=True).start()
        self.at_start = time.perf_counter(), self.cpu()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(60)
        if Server.keep_steps:
            Server.kept += 1
            shutil.copy(self.step_log, os.path.join(Server.keep_steps, f"steps{Server.kept}.csv"))

    def cpu(self):
        """Seconds of CPU: the whole machine's, the server's, this program's with the children that have ended."""
        ticks = os.sysconf("SC_CLK_TCK")
        with open("/proc/stat", encoding="ascii") as f:
            busy = sum(int(n) for i, n in enumerate(f.readline().split()[1:9]) if i not in (3, 4)) / ticks
        with open(f"/proc/{self.process.pid}/stat", encoding="ascii") as f:
            own = sum(map(int, f.read().rsplit(")", 1)[1].split()[11:13])) / ticks
        return busy, own, sum(os.times()[:4])

    def others_cpus(self):
        """What other programs computed since the start, in cores."""
        begin, (busy, own, mine) = self.at_start
        now = self.cpu()
        return (now[0] - busy - (now[1] - own) - (now[2] - mine)) / (time.perf_counter() - begin)

    def slower(self):
        """How many times as long as the table says steps have taken, in the mean over time."""
        text = self.metrics()
        taken = sum(map(float, re.findall(r"^nestedfp:step_time_seconds_sum[^\n]* (\S+)$", text, re.M)))
        table = float(re.search(r"^nestedfp:table_step_time_seconds_total[^\n]* (\S+)$", text, re.M).group(1))
        return taken / table if table else None

    def metrics(self):
        return urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics").read().decode()

    def prediction(self):
        with open(self.step_log, encoding="utf-8") as f:
            return prediction(list(csv.DictReader(f)))

    def changes(self):
        found = re.findall(r'^nestedfp:level_changes_total\{[^\n]*reason="(\w+)"[^\n]* (\S+)$', self.metrics(), re.M)
        return {reason: float(count) for reason, count in found if float(count)}


def token_ids(count, seed):
    numbers = random.Random(seed)
    return [16 + numbers.randrange(224) for _ in range(count)]


async def complete(port, prompt, count, stop=None):
    """Times of the answer's tokens."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": count, "stream": True, "temperature": 0,
                       "ignore_eos": True}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                 b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    times = []
    while not (stop and stop.is_set()):
        line = await reader.readline()
        if not line or b"[DONE]" in line:
            break
        if b'"choices":[{' in line:
            times.append(time.perf_counter())
    writer.close()
    return times


async def long_prompt(server):
    alone = []
    for seed in (1, 2):
        begin = time.perf_counter()
        alone.append((await complete(server.port, token_ids(LONG, seed), 2))[0] - begin)
    runs = []
    for seed in (3, 4):
        stop = asyncio.Event()
        streams = [asyncio.create_task(complete(server.port, STORY.format(i), 3000, stop)) for i in range(STREAMS)]
        await asyncio.sleep(2)
        begin = time.perf_counter()
        end = (await complete(server.port, token_ids(LONG, seed), 2))[0]
        await asyncio.sleep(0.3)
        stop.set()
        gaps = [(b - a, b > begin and a < end) for times in await asyncio.gather(*streams) for a, b in zip(times, times[1:])]
        beside = sorted(gap for gap, during in gaps if during)
        before = sorted(gap for gap, during in gaps if not during)
        runs.append({"prefill_s": end - begin, "gaps": len(beside), "longest_gap_ms": 1e3 * beside[-1],
                     "median_gap_ms": 1e3 * beside[len(beside) // 2], "median_gap_before_ms": 1e3 * before[len(before) // 2]})
    best = min(alone)
    return {"prompt_tokens": LONG, "streams": STREAMS, "alone_s": alone, "beside": runs,
            "longer_percent": [100 * (run["prefill_s"] / best - 1) for run in runs],
            "prediction": server.prediction(), "slower_than_table": server.slower(), "level_changes": server.changes(),
            "others_cpus": server.others_cpus()}


def play(args, folder, part, table, trace, flags):
    """The trace against both policies on the machine, then simulated from `table`."""
    keep = ("attainment_tight", "attainment_loose", "attainment_own_targets", "fp16_token_share", "ttft_s", "tpot_s", "longest_gap_s", "requests", "failed",
            "seconds", "rate", "switches")
    result = {}

    def row(name, *command):
        out = os.path.join(folder, "replay.json")
        each = ["--csv", os.path.join(Server.keep_steps, f"{name}.csv")] if Server.keep_steps else []
        run = subprocess.run([args.nestedfp, "replay", trace, *flags, *command, "--json", out, *each], capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(run.stderr[-2000:])
        with open(out, encoding="utf-8") as f:
            found = json.load(f)["rows"][0]
        return {name: found[name] for name in keep if name in found}

    for policy, serve in (("slo", []), ("fp16", ["--precision-policy", "fp16"])):
        with Server(args.nestedfp, args.model, args.cache, "--step-times", table, *serve) as server:
            real = row(f"{part}.{policy}.real", "--url", f"http://127.0.0.1:{server.port}", "--model", "m", "--simulate", table)
            slower, predicted = server.slower(), server.prediction()
            real |= {"others_cpus": server.others_cpus(), "prediction": predicted, "slower_than_table": slower,
                     "level_changes": server.changes()}
        simulate = ["--simulate", table, "--as-served", "--policies", policy]
        # Evenly spread errors are half as large in the mean as at most.
        as_it_was = ["--slowdown", f"{slower:.3f}", "--uneven", "0", "--noise", f"{min(2 * predicted['mean_error'], 0.9):.3f}"]
        result[policy] = {"real": real, "simulated": row(f"{part}.{policy}.simulated", *simulate),
                          "simulated_as_slow": row(f"{part}.{policy}.as_slow", *simulate, *as_it_was)}
    # Of targets of its own the engine judges by the tokens; what comes over HTTP may wait for the rest of a character.
    for simulated in ("simulated", "simulated_as_slow"):
        of = result["slo"]
        of[f"own_targets_{simulated}_off_points"] = 100 * (of[simulated]["attainment_own_targets"] - of["real"]["attainment_own_targets"])
    for name in ("attainment_tight", "attainment_loose"):
        result[f"{name}_gain_points"] = 100 * (result["slo"]["real"][name] - result["fp16"]["real"][name])
        for policy in ("fp16", "slo"):
            of = result[policy]
            for simulated in ("simulated", "simulated_as_slow"):
                of[f"{name}_{simulated}_off_points"] = 100 * (of[simulated][name] - of["real"][name])
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nestedfp")
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("parts", nargs="?", default="long,burst,trace")
    parser.add_argument("--trace", help="an Azure trace (CSV)")
    parser.add_argument("--keep-steps", help="a folder for the servers' step logs, the table and what became of each request")
    args = parser.parse_args()
    record.check(args.out)
    Server.keep_steps = args.keep_steps
    parts = args.parts.split(",")
    result = {"what": __doc__.split("\n")[0], **record.host(), "load_average": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as folder:
        args.cache = os.path.join(folder, "cache")
        os.makedirs(args.cache)
        begin = time.perf_counter()
        with Server(args.nestedfp, args.model, args.cache) as server:
            tables = os.path.join(args.cache, "nestedfp", "step-times")
            table = os.path.join(tables, os.listdir(tables)[0])
            with open(table, encoding="utf-8") as f:
                result["step_times"] = json.load(f)
            if args.keep_steps:
                shutil.copy(table, os.path.join(args.keep_steps, "step-times.json"))
            result["start"] = {"seconds": time.perf_counter() - begin, "says": [s for s in server.says if "step times" in s]}
            if "long" in parts:
                result["long_prompt"] = asyncio.run(long_prompt(server))
        if "burst" in parts:
            result["burst"] = {"trace": os.path.basename(BURST), **play(args, folder, "burst", table, BURST, [])}
        if "trace" in parts and args.trace:
            flags = ["--requests", str(TRACE["requests"]), "--rate", str(TRACE["rate"]), "--max-tokens", str(TRACE["most_tokens"]),
                     "--seed", str(TRACE["seed"])]
            result["trace"] = {"trace": {"file": os.path.basename(args.trace), **TRACE}, **play(args, folder, "trace", table, args.trace, flags)}
    result["load_average_after"] = os.getloadavg()[0]
    record.save(result, args.out)


if __name__ == "__main__":
    main()
