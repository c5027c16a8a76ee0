"""Soak of the whole program on a real model: random requests, a third of the clients killed in mid-stream, a KV cache so
small that requests are preempted, precision changing every few steps.

    soak.py NESTEDFP MODEL SECONDS OUT.json [CLIENTS [FLAGS OF serve ...]]

Checks that nothing leaks (KV blocks back to zero, resident memory flat), nothing stalls, and that every greedy answer
whose steps were all FP16 is, token for token, the answer of the same request run alone."""

import asyncio
import os
import random
import re
import subprocess
import sys
import time

import httpx

import record

PROGRAM, MODEL, SECONDS, OUT, *MORE = record.arguments(__doc__, 4)
record.check(OUT)
CLIENTS = int(MORE[0]) if MORE else 24
FLAGS = MORE[1:]
SERVERS = []
TEXTS = ["The capital of France is", "Once upon a time there was a", "def quicksort(items):", "The three laws of motion are",
         "A recipe for bread:", "In the year 1969,", "The difference between cats and dogs is", "1, 1, 2, 3, 5, 8,"]


def resident_kb(pid):
    with open(f"/proc/{pid}/status", encoding="ascii") as f:
        return int(re.search(r"VmRSS:\s+(\d+)", f.read()).group(1))


def metric(text, name):
    return sum(float(v) for v in re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.M))


def start(program, model):
    """The server, and its address."""
    server = subprocess.Popen(
        [program, "serve", model, "--port", "0", "--served-model-name", "m", "--max-model-len", "512", "--max-num-seqs", "16",
         "--kv-cache-memory", "24MB", "--disable-log-requests"]
        + ([] if "--precision-policy" in FLAGS else ["--precision-policy", "alternate:3"]) + FLAGS,
        stderr=subprocess.PIPE, text=True)
    SERVERS.append(server)
    for line in server.stderr:
        if line.startswith("ready"):
            return server, re.search(r"http://\S+", line).group(0)
    sys.exit("the server ended")


class Soak:
    def __init__(self, client, url, pid, seconds):
        self.client, self.url, self.pid = client, url, pid
        self.stop_at = time.time() + seconds
        self.source = random.Random(1)
        self.counts = {"complete": 0, "killed": 0, "compared": 0, "different": 0, "errors": 0, "queue_full": 0, "unhealthy": 0}
        self.exact = []  # (prompt, tokens, text) of greedy answers that were computed in FP16 throughout
        self.memory = []

    async def answer(self, body):
        try:
            r = await self.client.post(self.url + "/v1/completions", json=body)
        except httpx.HTTPError as failure:
            print("no answer:", repr(failure), file=sys.stderr)
            self.counts["errors"] += 1
            return None
        if r.status_code != 200:
            self.counts["queue_full" if r.status_code == 429 else "errors"] += 1
            return None
        return r.json()

    def request(self):
        pick = self.source
        return {"prompt": pick.choice(TEXTS) * pick.randint(1, 8), "max_tokens": pick.randint(4, 120), "temperature": pick.choice([0, 0, 0, 1]),
                "ignore_eos": True, "precision": pick.choice(["auto", "auto", "exact", "exact", "fast"])}

    async def leave_early(self, body):
        body["stream"] = True
        after = self.source.randint(0, 20)
        try:
            async with self.client.stream("POST", self.url + "/v1/completions", json=body) as r:
                async for _ in r.aiter_lines():
                    after -= 1
                    if after < 0:
                        break
        except httpx.HTTPError:
            self.counts["errors"] += 1
        self.counts["killed"] += 1

    async def work(self):
        while time.time() < self.stop_at:
            body = self.request()
            if self.source.random() < 1 / 3:
                await self.leave_early(body)
                continue
            got = await self.answer(body)
            if got is None:
                await asyncio.sleep(0.05)
                continue
            self.counts["complete"] += 1
            used = got["usage"]["nestedfp"]
            if body["temperature"] == 0 and used["prompt"]["fp8_tokens"] + used["completion"]["fp8_tokens"] == 0:
                self.exact.append((body["prompt"], body["max_tokens"], got["choices"][0]["text"]))

    async def watch(self):
        while time.time() < self.stop_at:
            await asyncio.sleep(2)
            if (await self.client.get(self.url + "/health")).status_code != 200:
                self.counts["unhealthy"] += 1
            self.memory.append(resident_kb(self.pid))

    async def idle_metrics(self):
        """What the server counts once nothing runs any more."""
        for _ in range(100):
            text = (await self.client.get(self.url + "/metrics")).text
            if metric(text, "vllm:num_requests_running") + metric(text, "vllm:num_requests_waiting") == 0:
                break
            await asyncio.sleep(0.1)
        return {"kv_use": metric(text, "vllm:kv_cache_usage_perc"), "preemptions": metric(text, "vllm:num_preemptions_total"),
                "precision_switches": metric(text, "nestedfp:precision_switches_total"),
                "steps": metric(text, "nestedfp:steps_total")}

    async def compare(self):
        """The same requests alone, each prompt once: a shorter answer is the beginning of the longest."""
        longest, alone = {}, {}
        for prompt, tokens, _ in self.exact:
            longest[prompt] = max(longest.get(prompt, 0), tokens)
        for prompt, tokens in longest.items():
            got = await self.answer({"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "precision": "exact"})
            alone[prompt] = got["choices"][0]["text"] if got else ""
        for prompt, _, text in self.exact:
            self.counts["compared"] += 1
            # The last character may be cut differently where it ends within a character.
            if not alone[prompt].startswith(text.rstrip("\ufffd")):
                self.counts["different"] += 1


async def main():
    seconds = float(SECONDS)
    server, url = start(PROGRAM, MODEL)
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=200)) as client:
        soak = Soak(client, url, server.pid, seconds)
        await asyncio.gather(soak.watch(), *(soak.work() for _ in range(CLIENTS)))
        final = await soak.idle_metrics()
        await soak.compare()
    server.terminate()
    code = server.wait(60)
    SERVERS.clear()
    counts, memory = soak.counts, soak.memory
    third = max(1, len(memory) // 3)
    result = {"what": "random requests with clients killed in mid-stream, preemption and precision changes on a real model",
              "command": f"bench/serve/soak.py NESTEDFP MODEL {seconds:.0f} OUT {CLIENTS} {' '.join(FLAGS)}".strip(), "date": time.strftime("%Y-%m-%d %H:%M"),
              "model": os.path.basename(MODEL), "cpus": len(os.sched_getaffinity(0)), "load_average": round(os.getloadavg()[2], 1),
              "seconds": seconds, "clients": CLIENTS, **counts, **final, "exit_code": code,
              "resident_mb_first_third_max": max(memory[:third]) / 1024, "resident_mb_last_third_max": max(memory[-third:]) / 1024}
    good = (counts["different"] == 0 and counts["errors"] == 0 and counts["unhealthy"] == 0 and final["kv_use"] == 0 and code == 0
            and counts["compared"] > 0 and final["preemptions"] > 0
            and result["resident_mb_last_third_max"] < 1.05 * result["resident_mb_first_third_max"] + 16)
    result["passed"] = good
    record.save(result, OUT)
    sys.exit(0 if good else 1)


try:
    asyncio.run(main())
finally:
    for left in SERVERS:  # after a failure
        left.kill()
