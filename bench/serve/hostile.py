"""Hostile clients against a running server, and a bystander who must not notice: he streams the same greedy answer over
and over, from a process of his own, and every gap between two of his tokens is taken down.

    hostile.py NESTEDFP MODEL OUT.json [--case NAME ...] [--flag=--threads=2 ...]
    hostile.py NESTEDFP_SERVE_FAKE fake OUT.json --sanitized     the same against the model that costs nothing

Starts the server on 127.0.0.1, talks to nothing else, and each case is bounded in count and time. After each case, with the
bystander asleep: /health is 200, nothing runs, no KV block is in use, memory is back within 20 MB. At the end SIGTERM under
20 streams must end the process with 0 in time."""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import record

CASES = {}
PROMPT = "Once upon a time, in a village by the sea,"
TOKENS = 60
CASE_S = 20  # the longest that a case may take
KV_MB = 256  # the KV cache, and no other mapping, has so much


def case(function):
    CASES[function.__name__] = function
    return function


def head(path, length, more="", method="POST", host="127.0.0.1"):
    return (f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {length}\r\n{more}\r\n").encode()


class Target:
    def __init__(self, port, pid):
        self.port, self.pid = port, pid

    async def raw(self, data, timeout=10.0, half_close=False):
        """Sends bytes; returns what comes back until the server closes or the time is up."""
        got = b""
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", self.port), timeout)
        except (OSError, asyncio.TimeoutError):
            return got
        try:
            writer.write(data)
            if half_close:
                writer.write_eof()
            end = time.monotonic() + timeout
            while (left := end - time.monotonic()) > 0:
                part = await asyncio.wait_for(reader.read(65536), left)
                if not part:
                    break
                got += part
                if len(got) > 4 << 20:
                    break
        except (OSError, asyncio.TimeoutError):
            pass
        finally:
            writer.close()
        return got

    async def post(self, path, body, timeout=10.0):
        """Status (0: none came in time) and body. The connection is closed when the time is up."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        got = await self.raw(head(path, len(data), "Connection: close\r\n") + data, timeout)
        first, _, rest = got.partition(b"\r\n\r\n")
        return (int(first.split(b" ")[1]), rest) if first.startswith(b"HTTP/1.1 ") else (0, b"")

    async def vanish(self, path, body, after):
        """Leaves, with a reset, some time after the request."""
        data = json.dumps(body).encode()
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            writer.write(head(path, len(data)) + data)
            await asyncio.sleep(after)
            writer.close()
        except OSError:
            pass

    def get(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=20) as r:
            return r.read().decode()

    def metric(self, name):
        values = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", self.get("/metrics"), re.M)
        return sum(map(float, values))

    def between_steps(self):
        """How often the engine's thread took so long, at most, from the end of a step to waiting for the next: {seconds: n}."""
        found = re.findall(r'^nestedfp:between_steps_seconds_bucket\{.*le="([^"]*)"\} (\d+)$', self.get("/metrics"), re.M)
        counts = [int(n) for _, n in found]
        return {float(le): n - before for (le, _), n, before in zip(found, counts, [0] + counts)}

    def resident_mb(self):
        """Without the KV cache: its pages become resident as blocks are first used, up to what --kv-cache-memory set apart."""
        total, counted = 0, True
        with open(f"/proc/{self.pid}/smaps", encoding="ascii", errors="replace") as f:
            for line in f:
                if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                    counted = int(found[2], 16) - int(found[1], 16) < KV_MB << 20
                elif counted and line.startswith("Rss:"):
                    total += int(line.split()[1])
        return total / 1024


def completion(**more):
    return {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, **more}


async def statuses(coroutines):
    counts = {}
    for status, _ in await asyncio.gather(*coroutines):
        counts[str(status)] = counts.get(str(status), 0) + 1
    return counts


# What a client may send as a body.

@case
async def wide_json(t):
    def wide(keys):
        return b'{"prompt":"a","metadata":{' + b",".join(b'"%d":0' % i for i in range(keys)) + b"}}"
    return await statuses([t.post("/v1/completions", wide(100_000)) for _ in range(4)] +
                          [t.post("/v1/completions", wide(4_000)) for _ in range(4)])


@case
async def deep_json(t):
    return await statuses([t.post("/v1/completions", b) for b in (b"[" * 10_000_000, b'{"a":' * 2_000_000,
                                                                  b'{"prompt":' + b"[" * 60 + b"]" * 60 + b"}")])


@case
async def many_values(t):
    return await statuses([t.post("/v1/completions", b'{"prompt":"a","x":[' + b"[]," * 900_000 + b"0]}") for _ in range(6)])


@case
async def long_prompts(t):
    messages = {"messages": [{"role": "user", "content": ""}] * 4096, "max_tokens": 4}
    kwargs = {"max_tokens": 4, "messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"x": "y" * 20_000_000}}
    arguments = {"max_tokens": 4, "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": "y" * 10_000_000})}}]}]}
    reasoning = {"max_tokens": 4, "messages": [{"role": "user", "content": "a"},
                              {"role": "assistant", "content": "", "reasoning_content": "r " * 5_000_000}]}
    return await statuses([t.post("/v1/chat/completions", b, 15) for b in (messages, kwargs, arguments, reasoning)] +
                          [t.post("/v1/completions", {"prompt": "word " * 4_000_000}, 15),
                           t.post("/tokenize", {"prompt": "some words and more " * 300_000}, 15)])


@case
async def tokenize_and_leave(t):
    await asyncio.gather(*(t.vanish("/tokenize", {"prompt": "some words and more " * 500_000}, 0.3) for _ in range(8)))
    return {}


@case
async def large_logit_bias(t):
    return await statuses([t.post("/v1/completions", completion(logit_bias={str(i): 1 for i in range(n)}))
                           for n in (1000, 100_000)])


@case
async def many_stop_strings(t):
    return await statuses([t.post("/v1/completions", completion(stop=[f"stop{i}" for i in range(n)])) for n in (16, 1000)])


# Grammars.

SUMS = 'root ::= e\ne ::= e e | e e e | "a" | "a" e | e "a" | "a" e "a"'


@case
async def grammar_slow_masks(t):
    regex = "(([a-z]{1,400} ){1,400}[a-z]{1,400})*"
    return await statuses([t.post("/v1/completions", completion(guided_regex=regex, max_tokens=64), 15)] +
                          [t.post("/v1/completions", completion(guided_grammar=SUMS, max_tokens=1000), 15)])


@case
async def grammar_n_128(t):
    return await statuses([t.post("/v1/completions", completion(guided_regex="(([a-z]{1,400} ){1,400}[a-z]{1,400})*", n=128,
                                                                max_tokens=4), 15)])


@case
async def grammar_slow_compiles(t):
    optional = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(3000)}}
    quantifiers = "a?" * 1000 + "a" * 1000
    ten_thousand = {"type": "object", "properties": {f"q{i}": {"type": "string"} for i in range(10_000)}}
    bombs = [{"guided_regex": quantifiers}, {"guided_json": optional}, {"guided_json": ten_thousand},
             {"guided_json": {"type": "array", "items": {"type": "integer"}, "minItems": 100_000_000}},
             {"guided_regex": "(a{1,9999}){1,9999}"}, {"guided_json": {"$ref": "#"}},
             {"guided_json": {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}}]
    tools = {"messages": [{"role": "user", "content": "a"}], "tool_choice": "required", "max_tokens": 8, "tools": [
        {"type": "function", "function": {"name": "f", "parameters": optional}}]}
    hogs = asyncio.gather(*(t.post("/v1/completions", completion(**b), 15) for b in bombs),
                          t.post("/v1/chat/completions", tools, 15),
                          *(t.vanish("/v1/completions", completion(guided_regex=quantifiers + "b" * i), 1) for i in range(1, 20)))
    await asyncio.sleep(1)
    begin = time.monotonic()
    status, _ = await t.post("/v1/completions", completion(guided_json={"type": "object", "properties": {
        f"k{random.random()}": {"type": "integer"}}}, max_tokens=4), 15)
    small_s = time.monotonic() - begin
    counts = {}
    for got in await hogs:
        if got is not None:
            counts[str(got[0])] = counts.get(str(got[0]), 0) + 1
    return {**counts, "small_schema_status": status, "small_schema_s": round(small_s, 2)}


# Clients that come and go.

@case
async def vanishing_clients(t):
    source = random.Random(2)
    body = completion(stream=True, max_tokens=200, ignore_eos=True)
    await asyncio.gather(*(t.vanish("/v1/completions", body, source.random() * 3) for _ in range(200)))
    return {}


@case
async def slow_readers(t):
    async def one():
        reader, writer = await asyncio.open_connection("127.0.0.1", t.port, limit=1024)
        data = json.dumps(completion(stream=True, max_tokens=100, ignore_eos=True, logprobs=20, n=4)).encode()
        writer.write(head("/v1/completions", len(data)) + data)
        for _ in range(12):
            await asyncio.sleep(0.4)
            await reader.read(64)
        writer.transport.abort()
    await asyncio.gather(*(one() for _ in range(8)))
    return {}


@case
async def large_events(t):
    """One event of hundreds of KB to a reader who reads as fast as he can: he must get all of it."""
    body = completion(stream=True, echo=True, logprobs=20, max_tokens=2)
    body["prompt"] = "word " * 1500
    status, rest = await t.post("/v1/completions", body, 15)
    return {str(status): 1, "bytes": len(rest), "complete": b"[DONE]" in rest}


@case
async def bytes_behind_a_request(t):
    data = json.dumps(completion(stream=True, max_tokens=1500, ignore_eos=True)).encode()

    async def one(extra):
        _, writer = await asyncio.open_connection("127.0.0.1", t.port)
        writer.write(head("/v1/completions", len(data)) + data + extra)
        await asyncio.sleep(0.5)
        writer.transport.abort()
    await asyncio.gather(*(one(b"x" * n) for n in (1, 100, 100_000, 900_000, 1) * 4))
    return {}


@case
async def header_floods(t):
    many = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(20_000)) + b"\r\n"
    long = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"a" * 2_000_000 + b"\r\n\r\n"
    got = await asyncio.gather(*(t.raw(d, 8) for d in (many, long) * 20))
    sockets = [socket.create_connection(("127.0.0.1", t.port)) for _ in range(300)]
    for s in sockets:
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0")
    await asyncio.sleep(2)
    for s in sockets:
        s.close()
    return {g[9:12].decode(errors="replace"): sum(1 for x in got if x[9:12] == g[9:12]) for g in got}


@case
async def bodies_without_a_right(t):
    """Bodies where nobody reads one."""
    big = b"a" * 4_000_000
    return await statuses([t.post(path, big) for path in ("/ping", "/health", "/nowhere")] * 10)


@case
async def doubtful_framing(t):
    second = b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    heads = [b"Transfer-Encoding: " + e for e in (b"xchunked", b"gzip", b"chunked, identity", b"chunked, chunked",
                                                  b"gzip, chunked", b"identity", b"\x0bchunked", b"chunked\r\nContent-Length: 3")]
    heads += [b"Content-Length: 3\r\nContent-Length: 4", b"Content-Length: +3", b"Content-Length: 0x3", b"Content-Length: 3, 3",
              b"Host: other\r\nContent-Length: 0"]
    answers = 0
    for h in heads:
        got = await t.raw(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n" + h +
                          b"\r\n\r\n" + second, 3)
        answers += got.count(b"HTTP/1.1 200")
    chunks = [b"5\r\nhello\r\n0\r\n\r\n", b"5;x=y\r\nhello\r\n0\r\n\r\n", b"fffffffffffffffffffff\r\n", b"-1\r\n", b"5\nhello\n0\n\n",
              b"0\r\nX: y\r\n\r\n", b"5\r\nhelloX\r\n0\r\n\r\n", b"1\r\na\r\n" * 5000 + b"0\r\n\r\n"]
    for c in chunks:
        await t.raw(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                    b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + c, 3)
    old = await t.raw(b"GET /health HTTP/1.0\r\n\r\n", 3)
    upgrade = await t.raw(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade, close\r\nUpgrade: h2c\r\n\r\n", 3)
    return {"smuggled": answers, "http_1_0": old[9:12].decode(), "upgrade": upgrade[9:12].decode()}


@case
async def many_answers(t):
    return await statuses([t.post("/v1/completions", completion(n=128, max_tokens=2), 15),
                           t.post("/v1/completions", completion(prompt=["a"] * 2048, max_tokens=1), 15)])


@case
async def stop_and_continue(t):
    """The whole process stands still for a second; what waited then goes on. The gap is the signal's, not ours."""
    os.kill(t.pid, signal.SIGSTOP)
    await asyncio.sleep(1)
    os.kill(t.pid, signal.SIGCONT)
    return await statuses([t.post("/v1/completions", completion(), 15)])


def bystander(port, awake, asleep, done, report):
    """Streams one greedy answer after another; reports (time, gap, first_token_s or None) and the texts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    body = json.dumps({"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True,
                       "precision": "exact"}).encode()
    gaps, texts, errors = [], {}, []
    while not done.is_set():
        if not awake.is_set():
            asleep.set()
            time.sleep(0.01)
            continue
        asleep.clear()
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=60) as s:
                begin = last = time.monotonic()
                s.sendall(head("/v1/completions", len(body), "Connection: close\r\n") + body)
                text, first = "", True
                for line in s.makefile("rb"):
                    if not line.startswith(b"data: {"):
                        continue
                    now = time.monotonic()
                    event = json.loads(line[6:])
                    if "error" in event:
                        errors.append(event["error"]["message"])
                        break
                    text += event["choices"][0]["text"]
                    gaps.append((now, 0 if first else now - last, now - begin if first else None))
                    first, last = False, now
                texts[text] = texts.get(text, 0) + 1
        except OSError as failure:
            errors.append(repr(failure))
            time.sleep(0.1)
    report.put((gaps, texts, errors))


def percentile(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0


async def settle(t, asleep, awake, base_mb=None):
    """With the bystander asleep, what is left of a case. Memory has some seconds to come back: the allocator gives it back
    up to two seconds after the last large request."""
    awake.clear()
    while not asleep.is_set():
        await asyncio.sleep(0.01)
    begin = time.monotonic()
    state = {}
    while time.monotonic() - begin < 15:
        state = {"running": t.metric("vllm:num_requests_running") + t.metric("vllm:num_requests_waiting"),
                 "kv_use": t.metric("vllm:kv_cache_usage_perc"), "compiling": t.metric("nestedfp:grammars_compiling"),
                 "request_bytes": t.metric("nestedfp:request_bytes")}
        if not any(state.values()):
            break
        await asyncio.sleep(0.05)
    try:
        state["health"] = 200 if '"ok"' in t.get("/health") else 0
    except OSError as failure:
        state["health"] = getattr(failure, "code", 0)
    state["settled_s"] = round(time.monotonic() - begin, 2)
    for _ in range(80):
        state["resident_mb"] = round(t.resident_mb(), 1)
        if base_mb is not None and state["resident_mb"] <= base_mb + 20:
            break
        await asyncio.sleep(0.1)
    asleep.clear()
    awake.set()
    return state


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("--case", action="append", choices=sorted(CASES))
    parser.add_argument("--flag", action="append", default=[])
    parser.add_argument("--sanitized", action="store_true", help="memory is not judged: a sanitizer keeps what was freed")
    args = parser.parse_args()
    record.check(args.out)
    return args


def start(args):
    """The server, its output in OUT.log, and its port."""
    command = [args.program, "serve", args.model, "--port", "0", "--served-model-name", "m", "--max-model-len", "2048",
               "--max-num-seqs", "16", "--max-num-batched-tokens", "64", "--kv-cache-memory", f"{KV_MB}MiB",
               "--disable-log-requests", "--drain-timeout", "2"]
    if args.model == "fake":
        command = [args.program, "--step-us", "5000", "--max-num-seqs", "16", "--max-model-len", "2048", "--kv-blocks", "7600",
                   "--drain-timeout-ms", "2000"]
    log = open(args.out + ".log", "w+", encoding="utf-8")  # pylint: disable=consider-using-with
    server = subprocess.Popen(command + args.flag, stderr=log, stdout=log)  # pylint: disable=consider-using-with
    for _ in range(1200):
        with open(log.name, encoding="utf-8", errors="replace") as f:
            if found := re.search(r"^(?:ready.*|http.*):(\d+)\s", f.read(), re.M):
                return server, int(found.group(1))
        assert server.poll() is None, "the server ended"
        time.sleep(0.1)
    server.kill()
    sys.exit("the server is not ready after 120 s")


async def warm_up(t):
    """Everything once, and every block of the KV cache, so that what first use takes is not counted as a leak."""
    await statuses([t.post("/v1/completions", completion(prompt=[100 + i] * 1900, max_tokens=1), 120) for i in range(7)])
    await statuses([t.post("/v1/completions", completion(guided_regex="[a-z]+", n=4)),
                    t.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * 30_000}]}),
                    t.post("/v1/completions", {"prompt": "a", "x": [0] * 900_000})])


async def attack(t, name):
    """Case `name`: what came of it, and what the engine's thread did between its steps meanwhile."""
    before = t.between_steps()
    begin = time.monotonic()
    try:
        result = {"outcome": await asyncio.wait_for(CASES[name](t), CASE_S + 10)}
    except asyncio.TimeoutError:
        result = {"outcome": {"timed_out": True}}
    end = time.monotonic()
    between = {le: n - before[le] for le, n in t.between_steps().items() if n > before[le]}
    longest = 1000 * max(between, default=0)
    result.update({"seconds": round(end - begin, 2), "steps": sum(between.values()),
                   "between_steps_ms_at_most": longest if longest < 1e6 else "more than 1000",
                   "between_steps_over_20_ms": sum(n for le, n in between.items() if le > 0.02)})
    return result, (begin, end)


async def terminate(t, server):
    """SIGTERM under load: what streams is cut after --drain-timeout with an event that says so."""
    body = completion(stream=True, max_tokens=1900, ignore_eos=True)
    streams = [asyncio.create_task(t.post("/v1/completions", body, 20)) for _ in range(20)]
    await asyncio.sleep(1.5)
    begin = time.monotonic()
    server.send_signal(signal.SIGTERM)
    cut = await asyncio.gather(*streams)
    code = await asyncio.to_thread(server.wait, 60)
    return {"exit_code": code, "seconds": round(time.monotonic() - begin, 2),
            "streams_with_an_error_event": sum(1 for _, rest in cut if b'"error"' in rest and b"[DONE]" in rest)}


def latencies(gaps, begin, end):
    """What the bystander saw from `begin` to `end`."""
    inside = [g for at, g, _ in gaps if begin <= at <= end + 0.5]
    firsts = [f for at, _, f in gaps if f is not None and begin <= at <= end + 0.5]
    return {"longest_gap_ms": round(1000 * max(inside, default=0), 1), "p99_gap_ms": round(1000 * percentile(inside, 0.99), 1),
            "longest_first_token_ms": round(1000 * max(firsts, default=0), 1), "tokens": len(inside)}


def summary(args, results, texts, errors, base):
    ours = [n for n in results if n not in ("stop_and_continue", "sigterm")]
    worst = max(ours, key=lambda n: results[n]["longest_gap_ms"])
    good = (len(texts) == 1 and not errors and results["sigterm"]["exit_code"] == 0 and
            all(r["health"] == 200 and r["running"] == 0 and r["kv_use"] == 0 and
                (args.sanitized or r["memory_mb"] <= 20)
                for n, r in results.items() if n not in ("quiet", "sigterm")))
    return {"what": "hostile clients beside one who streams greedy answers", "command": " ".join(["hostile.py", "NESTEDFP", "MODEL"]),
            "date": time.strftime("%Y-%m-%d %H:%M"), "model": os.path.basename(args.model),
            "cpus": len(os.sched_getaffinity(0)), "load_average": round(os.getloadavg()[1], 1),
            "bystander": {"longest_gap_ms": results[worst]["longest_gap_ms"], "in_case": worst, "answers": sum(texts.values()),
                          "different_texts": len(texts), "errors": errors[:5]},
            "steps": sum(results[n]["steps"] for n in ours if n != "quiet"),
            "between_steps_over_20_ms": sum(results[n]["between_steps_over_20_ms"] for n in ours if n != "quiet"),
            "resident_mb_before": base["resident_mb"], "cases": results, "passed": good}


async def main():
    args = arguments()
    server, port = start(args)
    t = Target(port, server.pid)
    awake, asleep, done = multiprocessing.Event(), multiprocessing.Event(), multiprocessing.Event()
    report = multiprocessing.Queue()
    watcher = multiprocessing.Process(target=bystander, args=(port, awake, asleep, done, report), daemon=True)
    watcher.start()
    windows, results = {}, {}
    try:
        awake.set()
        await asyncio.sleep(5)
        await warm_up(t)
        base = await settle(t, asleep, awake)
        begin = time.monotonic()
        await asyncio.sleep(5)
        windows["quiet"] = (begin, time.monotonic())
        for name in args.case or CASES:
            results[name], windows[name] = await attack(t, name)
            results[name].update(await settle(t, asleep, awake, base["resident_mb"]))
            results[name]["memory_mb"] = round(results[name]["resident_mb"] - base["resident_mb"], 1)
            print(name, results[name], flush=True)
        awake.clear()
        done.set()
        gaps, texts, errors = report.get(timeout=120)
        watcher.join(10)
        results["sigterm"] = await terminate(t, server)
    finally:
        done.set()
        if server.poll() is None:
            server.kill()
    for name, (begin, end) in windows.items():
        results.setdefault(name, {}).update(latencies(gaps, begin, end))
    result = summary(args, results, texts, errors, base)
    record.save(result, args.out)
    sys.exit(0 if result["passed"] else 1)


if __name__ == "__main__":
    asyncio.run(main())
