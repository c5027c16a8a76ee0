"""What any HTTP client may do to the server, friendly or not."""

import gzip
import json
import os
import re
import resource
import signal
import socket
import subprocess
import threading
import time

import httpx
import pytest

JSON = {"Content-Type": "application/json"}


def raw(server, data, timeout=20):
    """Sends bytes and returns all that comes back until the server closes."""
    with server.connect() as s:
        s.settimeout(timeout)
        try:
            s.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass
        got = b""
        try:
            while part := s.recv(65536):
                got += part
        except (ConnectionResetError, socket.timeout):
            pass
        return got


def alive(server):
    r = httpx.post(server.url + "/v1/completions", json={"prompt": "SAY:ok"}, timeout=20)
    assert r.status_code == 200 and r.json()["choices"][0]["text"] == "ok"


def test_plain_endpoints(fake):
    for path in ("/health", "/ping", "/version", "/load", "/metrics", "/openapi.json", "/", "/nestedfp/timeline"):
        r = httpx.get(fake.url + path)
        assert r.status_code == 200, path
        assert r.headers["X-Request-Id"]
    assert httpx.head(fake.url + "/health").content == b""
    page = httpx.get(fake.url + "/")
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    # Nothing is fetched from elsewhere; libraries that are part of the page name addresses in comments.
    assert not re.search(r"""(src|href|action)\s*=\s*["']?(https?:)?//|url\(\s*["']?(https?:)?//""", page.text)


def test_metrics_parse_and_count(fake):
    before = fake.metric("vllm:generation_tokens_total")
    httpx.post(fake.url + "/v1/completions", json={"prompt": "x", "max_tokens": 7})
    assert fake.metric("vllm:generation_tokens_total") == before + 7
    prompts = fake.metric("vllm:prompt_tokens_total")
    scored = {"prompt": "abc", "echo": True, "max_tokens": 0}
    usage = httpx.post(fake.url + "/v1/completions", json=scored).json()["usage"]
    assert usage["completion_tokens"] == 0 and fake.metric("vllm:generation_tokens_total") == before + 7
    assert fake.metric("vllm:prompt_tokens_total") == prompts + usage["prompt_tokens"]
    text = httpx.get(fake.url + "/metrics").text
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
                 "vllm:gpu_cache_usage_perc", "vllm:cache_config_info", "vllm:prompt_tokens_total",
                 "vllm:request_success_total", "vllm:num_preemptions_total", "vllm:prefix_cache_queries_total",
                 "vllm:prefix_cache_hits_total", "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds",
                 "vllm:time_per_output_token_seconds", "vllm:e2e_request_latency_seconds",
                 "vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds",
                 "vllm:request_decode_time_seconds", "vllm:iteration_tokens_total", "vllm:lora_requests_info",
                 "nestedfp:steps_total", "nestedfp:tokens_total", "nestedfp:precision_switches_total"):
        assert f"# TYPE {name} " in text, name


def test_demo_load(launch):
    """The page's slider: requests that the server makes for itself, as many as it is told to, and none any more at 0."""
    server = launch("--demo-load", "--step-us", 500)
    answered = lambda: server.metric("vllm:request_success_total")
    set_rate = lambda rate: httpx.post(f"{server.url}/nestedfp/demo-load?rate={rate}", headers=JSON)
    assert httpx.get(server.url + "/nestedfp/timeline").json()["demo_load"] == 0
    for rate in ("-1", "1001", "nan", "", "2x"):
        assert set_rate(rate).status_code == 400, rate
    assert answered() == 0
    assert set_rate(100).json() == {"demo_load": 100}
    end = time.time() + 60
    while answered() < 5 and time.time() < end:
        time.sleep(0.05)
    assert answered() >= 5
    timeline = httpx.get(server.url + "/nestedfp/timeline").json()
    assert timeline["demo_load"] == 100
    assert sum(s["fp16"] + s["fp8"] for s in timeline["slices"]) > 0
    assert set_rate(0).json() == {"demo_load": 0}
    time.sleep(0.1)
    server.wait_idle()
    before = answered()
    time.sleep(0.3)  # thirty more would have come
    assert answered() == before


def test_root_path_and_origins(launch):
    server = launch("--root-path", "/llm/", "--allowed-origins", "https://a.example")
    assert server.url.endswith("/llm")
    base = f"http://127.0.0.1:{server.port}"
    assert httpx.get(base + "/llm/health").status_code == 200
    assert httpx.get(base + "/health").status_code == 200
    r = httpx.options(base + "/llm/v1/completions", headers={"Origin": "https://a.example",
                                                             "Access-Control-Request-Method": "POST"})
    assert r.status_code == 204 and r.headers["Access-Control-Allow-Origin"] == "https://a.example"
    r = httpx.get(base + "/health", headers={"Origin": "https://a.example"})
    assert {"X-Request-Id", "Request-Id", "Retry-After"} <= set(r.headers["Access-Control-Expose-Headers"].split(", "))  # clients read these
    r = httpx.get(base + "/health", headers={"Origin": "https://b.example"})
    assert "Access-Control-Allow-Origin" not in r.headers
    for path in ("/v1/completions", "/v1/messages"):
        r = httpx.options(base + path, headers={"Origin": "https://b.example", "Access-Control-Request-Method": "POST"})
        assert r.status_code == 204 and not [name for name in r.headers if name.startswith("access-control")], (path, r.headers)


def test_keys_guard_everything_that_answers(launch):
    server = launch("--api-key", "secret")
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"),
                         ("POST", "/tokenize"), ("POST", "/detokenize")):
        for header in ({}, {"Authorization": "Bearer"}, {"Authorization": "Bearer secre"},
                       {"Authorization": "Bearer secretx"}, {"Authorization": "secret"}):
            r = httpx.request(method, server.url + path, headers={**header, **JSON})
            assert r.status_code == 401 and r.json()["error"]["code"] == "invalid_api_key", (path, header)
    # A body need not be sent to be refused.
    got = raw(server, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 20000000\r\n\r\n")
    assert got.startswith(b"HTTP/1.1 401 ")
    assert httpx.get(server.url + "/health").status_code == 200


def test_request_ids(fake):
    assert httpx.get(fake.url + "/health", headers={"X-Request-Id": "mine-1"}).headers["X-Request-Id"] == "mine-1"
    got = raw(fake, b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: a\x01b\r\nConnection: close\r\n\r\n")
    assert b"a\x01b" not in got


@pytest.mark.parametrize("body", [
    b"", b"{", b"[]", b"null", b"\"x\"", b"\xff\xfe{}", b'{"prompt": "\xff"}', b'{"prompt": "\xed\xa0\x80"}',
    b"[" * 100000, b'{"a":' * 50000, b'{"prompt": "a", "n": 1e999}', b'{"prompt": "a"} trailing', b"\x00" * 100,
    b'{"prompt": ' + b"[" * 63 + b"]" * 63 + b"}",
])
def test_bad_bodies_are_400(fake, body):
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        r = httpx.post(fake.url + path, content=body, headers=JSON)
        assert r.status_code == 400, (path, r.text)
        assert r.json()["error"]["message"]
    alive(fake)


def test_other_content_types_are_415(fake):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        r = httpx.post(fake.url + "/v1/completions", content=b'{"prompt":"a"}', headers={"Content-Type": kind})
        assert r.status_code == 415


def test_coded_bodies_are_415(fake):
    body = b'{"prompt":"a","max_tokens":1}'
    r = httpx.post(fake.url + "/v1/completions", content=gzip.compress(body), headers={**JSON, "Content-Encoding": "gzip"})
    assert r.status_code == 415 and "Content-Encoding" in r.json()["error"]["message"]
    assert httpx.post(fake.url + "/v1/completions", content=body, headers={**JSON, "Content-Encoding": "identity"}).status_code == 200


def test_large_bodies(launch):
    server = launch("--max-body", 1 << 20, "--allowed-origins", "https://a.example")
    large = b'{"prompt":"' + b"a" * (1 << 20) + b'"}'
    r = httpx.post(server.url + "/v1/completions", content=large, headers={**JSON, "X-Request-Id": "big", "Origin": "https://a.example"})
    assert r.status_code == 413 and "larger than 1048576 bytes" in r.json()["error"]["message"]
    # The head was read, so its client is answered as it knows answers.
    assert r.headers["X-Request-Id"] == "big" and r.headers["Access-Control-Allow-Origin"] == "https://a.example"
    r = httpx.post(server.url + "/v1/messages", content=large, headers=JSON)
    assert r.status_code == 413 and r.json()["type"] == "error" and r.json()["error"]["type"] == "request_too_large"
    assert 'http_requests_total{handler="/v1/messages",method="POST",status="4xx"} 1' in server.metrics()
    got = raw(server, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                      b"Transfer-Encoding: chunked\r\n\r\n" + (b"10000\r\n" + b"a" * 65536 + b"\r\n") * 20)
    assert got.startswith(b"HTTP/1.1 413 ")
    got = raw(server, b"GET /health HTTP/1.1\r\nX: " + b"a" * 100000 + b"\r\n\r\n")
    assert got.startswith(b"HTTP/1.1 431 ")
    # Within the limit but beyond the context: a clear answer, not a crash.
    r = httpx.post(server.url + "/v1/completions", json={"prompt": "a" * 900000}, timeout=60)
    assert r.status_code == 400 and r.json()["error"]["code"] == "context_length_exceeded"


def test_too_many_connections_are_told_in_the_log(launch):
    server = launch("--max-connections", 2)
    first, second = server.connect(), server.connect()
    for kept in (first, second):
        kept.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert kept.recv(100).startswith(b"HTTP/1.1 200")
    for _ in range(5):
        with server.connect() as more:
            assert more.recv(100) == b""
    told = [line for line in server.output().splitlines() if "--max-connections (2)" in line]
    assert len(told) == 1 and "warn" in told[0], server.output()
    first.close()
    time.sleep(0.5)
    assert httpx.get(server.url + "/health").status_code == 200
    second.close()


def test_too_few_open_files_are_told_in_the_log(launch):
    server = launch()
    before = server.metric("process_open_fds")
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (int(before) + 3,) * 2)
    clients = [server.connect() for _ in range(10)]
    time.sleep(1)
    told = [line for line in server.output().splitlines() if "accept failed: Too many open files; " in line]
    assert len(told) == 1 and "ulimit -n" in told[0], server.output()
    for client in clients:
        client.close()
    assert httpx.get(server.url + "/health", timeout=20).status_code == 200


def test_slow_clients_are_cut_off(launch):
    server = launch("--header-timeout-ms", 500, "--body-timeout-ms", 500)
    begin = time.time()
    sockets = [server.connect() for _ in range(200)]
    for s in sockets:
        s.sendall(b"POST /v1/completions HTTP/1.1\r\n")
    alive(server)  # the others do not wait
    for i in range(3):
        time.sleep(0.1)
        for s in sockets:
            try:
                s.sendall(b"X-%d: y\r\n" % i)
            except OSError:
                pass
    for s in sockets:
        s.settimeout(10)
        try:
            assert s.recv(1000).startswith(b"HTTP/1.1 408 ")
        except ConnectionResetError:
            pass
        s.close()
    assert time.time() - begin < 15
    got = raw(server, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                      b"Content-Length: 100\r\n\r\n{")
    assert got.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("target", [
    "/../../etc/passwd", "//etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/v1/models/../../../etc/passwd", "/v1//completions",
    "/V1/MODELS", "/health/", "/%00", "/" + "a" * 4000, "/v1/models/%", "/v1/models/%zz", "/?x=" + "y" * 4000,
    "http://evil.example/health", "*",
])
def test_path_tricks(fake, target):
    got = raw(fake, f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    status = int(got.split(b" ")[1])
    assert status in (200, 400, 404) and b"root:" not in got
    if status == 200:
        assert target.startswith(("/?x=", "http://"))


def test_header_injection(fake):
    got = raw(fake, b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: a\rSet-Cookie: b\r\nConnection: close\r\n\r\n")
    assert b"\r\nSet-Cookie" not in got and b"\rSet-Cookie" not in got
    for smuggled in (b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
                     b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab", b"Content-Length: +5\r\n\r\nabcde",
                     b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n"):
        got = raw(fake, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + smuggled)
        assert got.startswith(b"HTTP/1.1 400 "), (smuggled, got)
    alive(fake)


def test_ten_thousand_tiny_requests(fake):
    before = fake.resident_kb()
    with httpx.Client() as client:
        for i in range(5000):
            assert client.get(fake.url + "/health").status_code == 200
    for i in range(2500):
        with fake.connect() as s:
            s.sendall(b"\r\n" if i % 2 else b"GET / HTTP/1.0\r\n\r\n")
    with fake.connect() as s:
        s.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n" * 2500)
        got = b""
        while got.count(b"HTTP/1.1 200") < 2500:
            part = s.recv(1 << 20)
            assert part
            got += part
    alive(fake)
    if not os.environ.get("NFP_SANITIZE"):  # AddressSanitizer keeps what was freed
        assert fake.resident_kb() - before < 50_000


def test_a_client_that_goes_away_frees_its_blocks(launch):
    server = launch("--step-us", 2000)
    for stream in (True, False):
        with server.connect() as s:
            body = json.dumps({"prompt": "x", "max_tokens": 4000, "stream": stream}).encode()
            s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                      b"Content-Length: %d\r\n\r\n" % len(body) + body)
            end = time.time() + 10
            while server.metric("vllm:num_requests_running") == 0 and time.time() < end:
                time.sleep(0.01)
            assert server.metric("vllm:num_requests_running") == 1
        server.wait_idle(5)
        assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert server.metric("vllm:request_success_total") >= 2


def test_a_slow_reader_holds_up_only_itself(launch):
    server = launch("--stream-buffer", 65536, "--max-model-len", 100000, "--kv-blocks", 20000)
    with server.connect() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps({"prompt": "x", "max_tokens": 99000, "stream": True}).encode()
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                  b"Content-Length: %d\r\n\r\n" % len(body) + body)
        for _ in range(20):
            alive(server)
        server.wait_idle(30)
        assert server.metric("nestedfp:slow_readers_cut_total") == 1


def test_sigterm_drains(launch):
    server = launch("--step-us", 20000)
    result = {}

    def ask():
        with httpx.Client() as client:
            result["r"] = client.post(server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 50}, timeout=30)
    thread = threading.Thread(target=ask)
    thread.start()
    end = time.time() + 10
    while server.metric("vllm:num_requests_running") == 0 and time.time() < end:
        time.sleep(0.01)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url + "/health")
    thread.join()
    assert result["r"].status_code == 200 and len(result["r"].json()["choices"][0]["text"]) == 50
    assert server.process.wait(10) == 0


def test_sigterm_ends_what_does_not_end(launch):
    server = launch("--step-us", 50000, "--drain-timeout-ms", 500)
    with httpx.stream("POST", server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 4000, "stream": True},
                      timeout=30) as r:
        assert r.status_code == 200
        begin = time.time()
        assert server.stop() == 0
        assert time.time() - begin < 5
        events = [line[6:] for line in r.iter_lines() if line.startswith("data: ")]
    assert "shutting down" in json.loads(events[-2])["error"]["message"] and events[-1] == "[DONE]"


def test_sigterm_ends_work_that_is_under_way(launch):
    """A large body that is parsed, a text that is tokenized, a grammar that is compiled."""
    server = launch("--drain-timeout-ms", 500)
    properties = {f"p{i}": {"type": "integer"} for i in range(4000)}
    bodies = [("/v1/completions", {"prompt": "a", "x": [[]] * 5_000_000}), ("/tokenize", {"prompt": "some words " * 2_000_000}),
              ("/v1/completions", {"prompt": "a", "guided_json": {"type": "object", "properties": properties}})]
    sockets = []
    for path, body in bodies * 2:
        data = json.dumps(body, separators=(",", ":")).encode()
        sockets.append(server.connect())
        sockets[-1].sendall(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" %
                            (path.encode(), len(data)) + data)
    begin = time.time()
    assert server.stop() == 0
    # One second is the drain timeout and the end of its streams.
    assert time.time() - begin < (40 if os.environ.get("NFP_SANITIZE") else 8)
    for s in sockets:
        s.close()


def test_a_log_that_nobody_reads_any_more_ends_nothing():
    command = [os.environ["NFP_SERVE_FAKE"], "--log-requests"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        url = process.stdout.readline().decode().strip()
        process.stdout.close()
        process.stderr.close()
        for _ in range(5):
            r = httpx.post(url + "/v1/completions", json={"prompt": "SAY:ok"}, timeout=20)
            assert r.status_code == 200 and r.json()["choices"][0]["text"] == "ok"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_preemption_changes_no_answer(launch):
    server = launch("--kv-blocks", 24, "--max-num-seqs", 16, "--step-us", 2000, "--precision-policy", "alternate:3", "--max-model-len", 300)
    expected = "".join(chr(ord("a") + i % 26) for i in range(150))
    answers = []

    def ask():
        r = httpx.post(server.url + "/v1/completions", json={"prompt": "preempt", "max_tokens": 150}, timeout=60)
        answers.append(r.json()["choices"][0]["text"])
    threads = [threading.Thread(target=ask) for _ in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert answers == [expected] * 16
    assert server.metric("vllm:num_preemptions_total") > 0
    assert server.metric("nestedfp:precision_switches_total") > 0
    server.wait_idle()
    assert server.metric("vllm:kv_cache_usage_perc") == 0
