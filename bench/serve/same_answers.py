"""Greedy answers of a GPU beside the CPU's: the same model, served on both, the same prompts, exact FP16.

    same_answers.py NESTEDFP MODEL PROMPTS.txt OUT.json [COUNT]

Takes COUNT (64) pieces of the text as prompts and 48 tokens of answer each, 32 requests at a time, with --deterministic.
Where two answers part, the CPU's log-probabilities of its two likeliest tokens there say how close a call it was."""

import asyncio
import os
import random
import re
import subprocess
import sys

import httpx

import record

PROGRAM, MODEL, PROMPTS, OUT, *MORE = record.arguments(__doc__, 4)
record.check(OUT)
COUNT = int(MORE[0]) if MORE else 64
TOKENS, AT_ONCE = 48, 32


def pick_prompts():
    with open(PROMPTS, encoding="utf-8") as f:
        lines = [line.strip() for line in f if len(line) > 200]
    pick = random.Random(64)
    return [pick.choice(lines)[: pick.randint(20, 200)] for _ in range(COUNT)]


def start(device):
    server = subprocess.Popen([PROGRAM, "serve", MODEL, "--device", device, "--deterministic", "--port", "0", "--precision-policy", "fp16",
                               "--served-model-name", "m", "--max-model-len", "512", "--kv-cache-memory", "256MB",
                               "--disable-log-requests"],
                              stderr=subprocess.PIPE, text=True)
    for line in server.stderr:
        if line.startswith("ready"):
            return server, re.search(r"http://\S+", line).group(0)
    sys.exit(f"the server on {device} ended")


async def answers(url, prompts):
    places = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(timeout=600) as client:

        async def one(prompt):
            body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "precision": "exact", "logprobs": 2,
                    "return_token_ids": True}
            async with places:
                answer = await client.post(url + "/v1/completions", json=body)
            answer.raise_for_status()
            return answer.json()["choices"][0]

        return await asyncio.gather(*map(one, prompts))


def main():
    prompts, found = pick_prompts(), {}
    for device in ("cpu", "cuda"):
        server, url = start(device)
        try:
            found[device] = asyncio.run(answers(url, prompts))
        finally:
            server.terminate()
            server.wait()
    same, parted = 0, []
    for ours, theirs in zip(found["cpu"], found["cuda"]):
        a, b = ours["token_ids"], theirs["token_ids"]
        if a == b:
            same += 1
            continue
        at = next(i for i in range(TOKENS) if a[i] != b[i])
        likeliest = sorted(ours["logprobs"]["top_logprobs"][at].values(), reverse=True)
        parted.append({"token": at, "gap": round(likeliest[0] - likeliest[1], 5)})
    result = {"answers": len(prompts), "tokens": TOKENS, "same": same, "parted": sorted(parted, key=lambda p: p["gap"])}
    record.save({"command": f"bench/serve/same_answers.py NESTEDFP MODEL {os.path.basename(PROMPTS)} OUT {COUNT}",
                 "model": os.path.basename(MODEL), **record.host(), **result}, OUT)


main()
