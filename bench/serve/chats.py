"""Concurrent chats with a real model through the server, against `nestedfp bench` at the same batch size.

    chats.py NESTEDFP MODEL OUT.json [CHATS] [TOKENS]

Both get all cores; the server's share of them also carries HTTP and this client. `steady` is the rate while all chats
run, which is what `bench` measures; `whole` also has the prompts' computation and the ends. The chats come twice: the
first time the KV cache's pages are touched for the first time, which takes as long as the machine needs to find and
clear them, and is kept apart (`first_steady`). `server_cpu_ms_per_token` is the processor time of the server's threads,
which other work on the machine moves less than the rates."""

import json
import os
import re
import selectors
import socket
import subprocess
import time

import record


def bench(program, model, chats, context, tokens):
    run = subprocess.run([program, "bench", model, "--batch", str(chats), "--context", str(context), "--generate", str(tokens),
                          "--repeats", "2", "--json"], capture_output=True, text=True, check=True)
    rows = json.loads(run.stdout)["rows"]
    return {row["precision"]: row["tokens_per_s"] for row in rows if row["test"] == "decode"}


def chat(port, chats, tokens, topic):
    """The rates of `chats` answers of `tokens` tokens, streamed together."""
    sockets = selectors.DefaultSelector()
    begin = time.perf_counter()
    for i in range(chats):
        body = json.dumps({"messages": [{"role": "user", "content": f"Tell me a story about the {topic} {i}."}], "stream": True,
                           "max_tokens": tokens, "ignore_eos": True, "temperature": 0}).encode()
        s = socket.create_connection(("127.0.0.1", port))
        s.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
                  b"Content-Length: %d\r\n\r\n" % len(body) + body)
        sockets.register(s, selectors.EVENT_READ, [b"", 0])
    events = []  # (time, chats that have begun, tokens so far), after each read
    begun = total = 0
    usage = {"fp16_tokens": 0, "fp8_tokens": 0}
    while sockets.get_map():
        for key, _ in sockets.select():
            part = key.fileobj.recv(1 << 16)
            state = key.data
            if not part:
                text = state[0].decode()
                assert "data: [DONE]" in text, text[-500:]
                for name, count in re.findall(r'"completion":\{"(fp16_tokens)":(\d+)', text):
                    usage[name] += int(count)
                for count in re.findall(r'"completion":\{"fp16_tokens":\d+,"fp8_tokens":(\d+)', text):
                    usage["fp8_tokens"] += int(count)
                sockets.unregister(key.fileobj)
                key.fileobj.close()
                continue
            state[0] += part
            # Each token is one event with text; some tokens make no text of their own (parts of a character).
            seen = part.count(b'"content":"') - part.count(b'"content":""')
            if seen and state[1] == 0:
                begun += 1
            state[1] += seen
            total += seen
            events.append((time.perf_counter(), begun, total, part.find(b"[DONE]") >= 0))
    seconds = time.perf_counter() - begin
    first = next(e for e in events if e[1] == chats)
    last = next(e for e in events if e[3])
    made = sum(usage.values())
    assert made == chats * tokens, (made, total)
    steady = (last[2] - first[2]) / (last[0] - first[0]) * made / total
    return {"tokens": made, **usage, "whole_tokens_per_s": made / seconds, "steady_tokens_per_s": steady,
            "steady_s": last[0] - first[0]}


def serve(program, model, precision, chats, tokens):
    server = subprocess.Popen([program, "serve", model, "--port", "0", "--served-model-name", "m", "--precision", precision,
                               "--max-num-seqs", str(chats), "--max-model-len", "1024", "--disable-log-requests"],
                              stderr=subprocess.PIPE, text=True)
    try:
        port = next(int(m.group(1)) for line in server.stderr if (m := re.search(r"ready .*http://[^ ]*:(\d+) ", line)))
        first = chat(port, chats, tokens, "letter")
        cpu = record.cpu_seconds(server.pid)
        got = chat(port, chats, tokens, "number")
        cpu = record.cpu_seconds(server.pid) - cpu
        return {**got, "server_cpu_ms_per_token": 1e3 * cpu / got["tokens"],
                "first_steady_tokens_per_s": first["steady_tokens_per_s"]}
    finally:
        server.terminate()
        server.wait(60)


def main():
    program, model, out, *counts = record.arguments(__doc__, 3)
    record.check(out)
    chats = int(counts[0]) if counts else 32
    tokens = int(counts[1]) if len(counts) > 1 else 128
    result = {"what": f"{chats} concurrent streamed chats through nestedfp serve against nestedfp bench --batch {chats}",
              "command": f"bench/serve/chats.py NESTEDFP MODEL OUT {chats} {tokens}", **record.host(),
              "model": os.path.basename(model)}
    result["bench_tokens_per_s"] = bench(program, model, chats, 48, tokens)
    result["serve"] = {}
    for precision in ("fp16", "fp8"):
        got = serve(program, model, precision, chats, tokens)
        got["steady_share_of_bench"] = got["steady_tokens_per_s"] / result["bench_tokens_per_s"][precision]
        got["whole_share_of_bench"] = got["whole_tokens_per_s"] / result["bench_tokens_per_s"][precision]
        result["serve"][precision] = {k: round(v, 4) for k, v in got.items()}
    record.save(result, out)


if __name__ == "__main__":
    main()
