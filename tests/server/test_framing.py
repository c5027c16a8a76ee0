"""Our framing of HTTP against h11's reading of the same bytes, on mutated streams of requests: we may refuse what h11
accepts (and close), but never see another request than it does, nor accept what it refuses. Empty lines before a
request, which h11 refuses and we skip (RFC 9112, 2.2), are taken away before it sees them.

As a program: test_framing.py SERVE_FAKE SECONDS [SEED]."""

import json
import os
import random
import re
import socket
import subprocess
import sys
import time

import h11

SENTINEL = b"GET /version HTTP/1.1\r\nHost: s\r\nConnection: close\r\n\r\n"
ENCODINGS = [b"chunked", b"Chunked", b"xchunked", b"gzip", b"chunked, identity", b"chunked, chunked", b"gzip, chunked", b"identity",
             b"chunked;q=1", b'"chunked"', b" chunked ", b"\tchunked", b"\x0bchunked", b"chunked,", b",chunked", b"", b"chun\x00ked"]
ENDS = [b"\r\n"] * 30 + [b"\n", b"\r", b"\r\r\n", b"\n\r\n", b" \r\n", b"\x00\r\n"]
METHODS = [b"GET", b"POST", b"POST", b"POST", b"OPTIONS"]


def one_of(source, *values):
    return source.choice(values)


def chunked(source, body):
    out = b""
    while body:
        size = source.randint(1, len(body))
        digits = b"%x" % size
        digits = one_of(source, *([digits] * 12), digits.upper(), b"0" + digits, b"000000000" + digits, digits + b" ", b" " + digits,
                        digits + b";a=b", digits + b';a="b"', digits + b"; x", b"0x" + digits, b"+" + digits, b"-" + digits,
                        digits + b"\x00", b"1" + b"0" * 20, digits + b"_0", digits + b";" + b"x" * 50, digits + b"\t;a")
        out += digits + source.choice(ENDS) + body[:size] + source.choice(ENDS)
        body = body[size:]
    out += one_of(source, *([b"0"] * 12), b"00", b"0;a=b", b"0 ", b"") + source.choice(ENDS)
    if source.random() < 0.15:
        out += one_of(source, b"X: y\r\n", b"Content-Length: 3\r\n", b"Transfer-Encoding: gzip\r\n", b" folded\r\n", b"no colon\r\n", b"X : y\r\n")
    return out + source.choice(ENDS)


def request(source):
    method = source.choice(METHODS)
    prompt = "".join(source.choice("abcdef GET/\\r\\n0:") for _ in range(source.randint(0, 40)))
    body = json.dumps({"prompt": prompt}).encode() if method == b"POST" else b""
    if source.random() < 0.1:
        body = b"GET /version HTTP/1.1\r\nHost: y\r\n\r\n"
    headers = [b"Host: x"]
    if method == b"POST":
        headers.append(b"Content-Type: application/json")
    payload = body
    if method == b"POST" and source.random() < 0.5:
        headers.append(b"Transfer-Encoding: " + (b"chunked" if source.random() < 0.7 else source.choice(ENCODINGS)))
        payload = chunked(source, body)
    elif body:
        n = b"%d" % len(body)
        headers.append(b"Content-Length: " + one_of(source, *([n] * 14), b"+" + n, b"0" + n, n + b", " + n, n + b"," + n, b"-" + n, n + b" ", b" " + n,
                                                     b"0x" + n, n + b".0", n + b"\x00", b"%d" % (len(body) + 3), b"%d" % max(0, len(body) - 3),
                                                     b"9" * 25, b"", n + b"\t", n + b"a", b"1_0"))
    while source.random() < 0.35:
        headers.insert(source.randint(0, len(headers)), one_of(
            source, b"Host: y", b"Content-Length: 3", b"Content-Length: 0", b"Transfer-Encoding: chunked",
            b"transfer-encoding:" + source.choice(ENCODINGS), b"X: y", b"X : y", b" X: y", b"\tfolded", b"X:", b": y", b"X", b"X\x00: y", b"X: a\x00b",
            b"X: a\rb", b"Transfer-Encoding : chunked", b"Content-Length : 5", b"Connection: close", b"Connection: keep-alive", b"Expect: 100-continue",
            b"Upgrade: h2c", b"Content-Length\x0b: 5", b"X: \xff\xfe", b"(X): y", b"X\xc3\xa9: y", b"Connection: upgrade", b"TE: trailers",
            b"Transfer_Encoding: chunked", b"X: " + b"y" * 300))
    if source.random() < 0.05:
        headers = [h for h in headers if not h.startswith(b"Host")]
    target = one_of(source, *([b"/tokenize" if method == b"POST" else b"/version"] * 14), b"http://x/version", b"/version?a=b", b"*", b"version", b"/a b",
                    b"/\x00", b"/\xff", b"", b"/version#f")
    version = one_of(source, *([b"HTTP/1.1"] * 20), b"HTTP/1.0", b"HTTP/2.0", b"http/1.1", b"HTTP/1.1 ", b"HTTP/1.2", b"HTTP/11", b"HTTP/0.9", b"")
    space = one_of(source, *([b" "] * 30), b"  ", b"\t")
    line = method + space + target + b" " + version
    out = one_of(source, *([b""] * 20), b"\r\n", b"\r\n" * 2, b"\r\n" * 9, b"\n", b" ") + line + source.choice(ENDS)
    for header in headers:
        out += header + source.choice(ENDS)
    return out + source.choice(ENDS) + payload


def stream(source):
    data = b"".join(request(source) for _ in range(source.randint(1, 3)))
    if source.random() < 0.2:
        data = bytearray(data)
        for _ in range(source.randint(1, 3)):
            at = source.randrange(len(data))
            data[at:at + source.randint(0, 2)] = bytes(source.choice(b"\r\n :,;0a\x00\xff\t") for _ in range(source.randint(0, 2)))
        data = bytes(data)
    return data + SENTINEL


def read_h11(data):
    """[(method, target, body)] and how it ended: close, error, incomplete, 1.0 (which h11 never keeps alive)."""
    def connect(data):
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
        connection.receive_data(re.sub(rb"\A(\r\n){1,8}", b"", data))
        return connection

    connection = connect(data)
    requests, current, body = [], None, b""
    while True:
        try:
            event = connection.next_event()
        except h11.RemoteProtocolError:
            return requests, "error"
        if event is h11.NEED_DATA:
            return requests, "incomplete"
        if isinstance(event, h11.Request):
            current, body = event, b""
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            requests.append((current.method, current.target, body))
            connection.send(h11.Response(status_code=200, headers=[("Content-Length", "0")]))
            connection.send(h11.EndOfMessage())
            if current.http_version == b"1.0":
                return requests, "1.0"
            if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                return requests, "close"
            connection = connect(connection.trailing_data[0])
        else:
            return requests, "close"


def read_ours(port, data):
    """[(status, body)] until the server closes."""
    got = b""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as s:
        try:
            s.sendall(data)
        except OSError:
            pass
        try:
            while part := s.recv(65536):
                got += part
        except OSError:
            pass
    answers = []
    while got:
        head, mark, rest = got.partition(b"\r\n\r\n")
        if not mark:
            break
        status = int(head.split(b" ")[1])
        length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
        size = int(length.group(1)) if length else 0
        if status != 100:
            answers.append((status, rest[:size]))
        got = rest[size:]
    return answers


def difference(data, port):
    """None, or what differs; and whether we were stricter."""
    theirs, end = read_h11(data)
    ours = read_ours(port, data)
    stricter = False
    for i, (status, body) in enumerate(ours):
        text = body.decode(errors="replace")
        refused = status in (400, 403, 404, 405, 408, 413, 415, 431) and '"invalid_json"' not in text and '"param":"' not in text
        if refused:
            # From here on we saw nothing more: nothing may follow.
            if i + 1 != len(ours):
                return f"an answer follows the refusal {status}: {ours}", False
            stricter = i < len(theirs)
            break
        if i >= len(theirs) and end == "1.0":
            break
        if i >= len(theirs):
            return f"request {i} was answered with {status} {text[:100]}, and h11 saw {len(theirs)} ({end})", False
        method, target, sent = theirs[i]
        if method == b"POST" and target.endswith(b"/tokenize"):
            try:
                parsed = json.loads(sent)
                expected = list(parsed["prompt"].encode()) if isinstance(parsed, dict) and set(parsed) == {"prompt"} else None
            except (ValueError, TypeError, AttributeError):
                expected = None
            if (status == 200) != (expected is not None) or (status == 200 and json.loads(body)["tokens"] != expected):
                return f"body {sent!r} was answered with {status} {text[:200]}", False
        elif method == b"GET" and target == b"/version" and status == 200 and b"version" not in body:
            return f"{method} {target} was answered with {text[:100]}", False
    return None, stricter


def fuzz(port, seconds, seed):
    source = random.Random(seed)
    end = time.monotonic() + seconds
    cases = stricter = 0
    while time.monotonic() < end:
        data = stream(source)
        found, strict = difference(data, port)
        assert found is None, f"case {cases} of seed {seed}: {found}\n{data!r}"
        cases += 1
        stricter += strict
    return cases, stricter


def test_framing_is_h11s(launch):
    server = launch("--header-timeout-ms", 300, "--body-timeout-ms", 300, "--idle-timeout-ms", 1000)
    cases, stricter = fuzz(server.port, float(os.environ.get("NFP_FRAMING_SECONDS", "10")), 1)
    assert cases > 20 and stricter < cases


def main():
    process = subprocess.Popen([sys.argv[1], "--header-timeout-ms", "300", "--body-timeout-ms", "300", "--idle-timeout-ms", "1000"],
                               stdout=subprocess.PIPE, text=True)
    try:
        port = int(re.search(r":(\d+)", process.stdout.readline()[7:]).group(1))
        seed = int(sys.argv[3]) if len(sys.argv) > 3 else 1
        cases, stricter = fuzz(port, float(sys.argv[2]), seed)
        print(f"{cases} streams, {stricter} refused that h11 reads, none read differently")
    finally:
        process.terminate()
        process.wait(20)


if __name__ == "__main__":
    main()
