"""The flags of nestedfp serve, and what it says at the start."""

import os
import re
import signal
import socket
import subprocess
import time

import httpx
import pytest


def refuse(*flags, env=None):
    """Output of a start that must fail before the model is loaded."""
    port = () if "--port" in flags else ("--port", 0)
    run = subprocess.run([os.environ["NFP_PROGRAM"], "serve", "no-such-model.gguf", *map(str, (*port, *flags))],
                         capture_output=True, text=True, timeout=60, env={**os.environ, **(env or {})})
    assert run.returncode != 0
    return run.stderr + run.stdout


def test_wrong_flags_are_named(tmp_path):
    assert "--api-key-file" in refuse("--api-key-file", tmp_path / "none")
    (tmp_path / "empty").write_text("# only a comment\n")
    assert "holds no key" in refuse("--api-key-file", tmp_path / "empty")
    assert "NESTEDFP_API_KEY" in refuse(env={"NESTEDFP_API_KEY": "a,,b"})
    assert "--root-path" in refuse("--root-path", "llm")
    assert "--precision-policy" in refuse("--precision-policy", "sometimes")
    assert "yaml" in refuse("--tool-call-parser", "yaml")
    assert "--host" in refuse("--host", "no.such.host.invalid")
    assert "--host is empty" in refuse("--host", "")  # not all addresses
    assert "--served-model-name is empty" in refuse("--served-model-name", "a", "")
    for origin in ("https://a.example/", "a.example", "https://", ""):
        assert f"--allowed-origins {origin}:" in refuse("--allowed-origins", "http://localhost:3000", "*", "null", origin)
    assert "--max-num-seqs" in refuse("--max-num-seqs", -1)
    assert "no-such-model.gguf" in refuse()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert str(port) in refuse("--port", port)


def test_help_names_every_flag():
    text = subprocess.run([os.environ["NFP_PROGRAM"], "serve", "--help"], capture_output=True, text=True, check=True).stdout
    documented = set()
    with open(os.path.join(os.path.dirname(__file__), "../../docs/serving.md"), encoding="utf-8") as f:
        for line in f:
            if line.startswith("| `--"):
                documented.update(re.findall(r"`(--[a-z0-9-]+)", line))
    offered = set(re.findall(r"^ +(?:-h,)?(--[a-z0-9-]+)", text, re.M)) - {"--help"}
    assert documented == offered


def demo_model():
    model = os.environ.get("NFP_DEMO_MODEL")
    if not model or not os.path.exists(model):
        pytest.skip("NFP_DEMO_MODEL does not name the demo model (scripts/test fetches it)")
    return model


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_while_loading(tmp_path, number):
    """Calibration takes its time, a CPU's alone, and the port answers meanwhile."""
    model = demo_model()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [os.environ["NFP_PROGRAM"], "serve", model, "--port", str(port), "--device", "cpu", "--calibrate", "self"]
    with subprocess.Popen(command, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)}, stderr=subprocess.DEVNULL) as process:
        end, answer = time.time() + 60, None
        while answer is None and time.time() < end:
            try:
                answer = httpx.get(f"http://127.0.0.1:{port}/health").status_code
            except httpx.TransportError:
                time.sleep(0.05)
        assert answer == 503
        process.send_signal(number)
        assert process.wait(20) == 0
    assert not [name for _, _, names in os.walk(tmp_path) for name in names if ".tmp-" in name]


@pytest.mark.parametrize("flag", ["--step-log", "--step-times", "--api-key-file"])
def test_a_stop_signal_while_a_pipe_has_nobody_at_its_other_end(tmp_path, flag):
    os.mkfifo(tmp_path / "pipe")
    command = [os.environ["NFP_PROGRAM"], "serve", "no-such-model.gguf", "--port", "0", flag, str(tmp_path / "pipe")]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        try:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1)
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()


def test_a_stop_signal_while_step_times_are_measured(tmp_path):
    command = [os.environ["NFP_PROGRAM"], "serve", demo_model(), "--port", "0"]
    with subprocess.Popen(command, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)}, stderr=subprocess.PIPE,
                          text=True) as process:
        assert any(line.startswith("step times are measured now") for line in process.stderr)
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=60)
        assert process.returncode == 0
    assert rest == ""  # neither that it was measured nor that it is ready
    assert not [name for _, _, names in os.walk(tmp_path) for name in names if ".tmp-" in name]


def test_a_log_that_nobody_reads():
    """It holds up neither requests nor the end, and whoever reads it again learns of what is missing."""
    command = [os.environ["NFP_PROGRAM"], "serve", demo_model(), "--port", "0", "--precision", "fp16", "--max-model-len", "256"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, bufsize=1) as process:
        url = next(re.search(r"http://\S+", line).group() for line in process.stderr if line.startswith("ready "))
        with httpx.Client(base_url=url, timeout=20) as client:
            for _ in range(1000):
                assert client.post("/v1/completions", json={"prompt": 1}).status_code == 400
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        lines = process.stderr.read().splitlines()
    taken = [line for line in lines if " status=400 " in line]
    assert 100 < len(taken) < 1000
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d info request=", line) for line in taken)


def test_start_keys_and_names(launch_real, tmp_path):
    (tmp_path / "keys").write_text("\ufefffrom-file\n# keys\n\nsecond\r\n", encoding="utf-8")
    os.environ["NESTEDFP_API_KEY"] = " from-env, and-more\t"
    try:
        server = launch_real("alias", "--api-key-file", tmp_path / "keys", "--api-key", "from-flag", "--max-model-len", 256,
                             "--max-num-seqs", 4, "--max-num-batched-tokens", 128, "--kv-cache-memory", "64MB",
                             "--precision", "fp8", "--log-prompts")
    finally:
        del os.environ["NESTEDFP_API_KEY"]
    start = server.output()
    for line in (r"^weights +\d+ bytes in after [\d.]+ s$", r"^model +demo \(.*one copy of the weights", r"^memory +.*in use",
                 r"^KV cache +.*tokens, or .* requests of 256", r"^batches +up to 4 requests and 128 tokens", r"^precision +",
                 r"^started +weights [\d.]+ s, step times [\d.]+ s, KV cache and engine [\d.]+ s$", r"^ready +http://127.0.0.1:"):
        assert re.search(line, start, re.M), (line, start)

    def status(key):
        return httpx.get(server.url + "/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code
    for key in ("from-file", "second", "from-flag", "from-env", "and-more"):
        assert status(key) == 200, key
    for key in ("# keys", "wrong", "from-env,and-more"):
        assert status(key) == 401, key
    headers = {"Authorization": "Bearer second"}
    assert [m["id"] for m in httpx.get(server.url + "/v1/models", headers=headers).json()["data"]] == ["demo", "alias"]
    r = httpx.post(server.url + "/v1/completions", headers=headers, timeout=120,
                   json={"model": "alias", "prompt": "Private words", "max_tokens": 4})
    assert r.json()["usage"]["nestedfp"]["completion"]["fp8_tokens"] == 4  # --precision fp8
    r = httpx.post(server.url + "/v1/completions", headers=headers, json={"prompt": "a " * 300, "max_tokens": 4}, timeout=120)
    assert r.json()["error"]["code"] == "context_length_exceeded"
    assert "Private words" in server.output()  # --log-prompts
