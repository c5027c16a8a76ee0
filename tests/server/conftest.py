import json
import os
import re
import signal
import socket
import subprocess
import time

import httpx
import pytest


def pytest_addoption(parser):
    parser.addoption("--real", action="store_true", help="only the tests that take the demo model")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--real"):
        others = [item for item in items if "launch_real" not in item.fixturenames]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if "launch_real" in item.fixturenames]


class Server:
    """A running server; `url` without a slash at the end."""

    def __init__(self, command, log, ready_s=120):
        self.log = log
        self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        end = time.time() + ready_s
        self.url = None
        while time.time() < end and self.url is None:
            if self.process.poll() is not None:
                raise RuntimeError(f"{command[0]} ended with {self.process.returncode}:\n{self.output()[-3000:]}")
            found = re.search(r"http://[0-9.]+:\d+\S*", self.output())
            if found:
                self.url = found.group(0)
            time.sleep(0.02)
        if self.url is None:
            self.stop()
            raise RuntimeError(f"not ready after {ready_s} s:\n{self.output()[-3000:]}")
        self.port = int(re.search(r":(\d+)", self.url[7:]).group(1))

    def output(self):
        with open(self.log.name, encoding="utf-8", errors="replace") as f:
            return f.read()

    def metrics(self):
        return httpx.get(self.url + "/metrics").text

    def metric(self, name):
        """Sum of a metric over all its label sets."""
        values = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", self.metrics(), re.M)
        assert values, f"{name} is not in /metrics"
        return sum(map(float, values))

    def resident_kb(self):
        with open(f"/proc/{self.process.pid}/status", encoding="ascii") as f:
            return int(re.search(r"VmRSS:\s+(\d+)", f.read()).group(1))

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def wait_idle(self, seconds=20):
        end = time.time() + seconds
        while time.time() < end:
            if self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting") == 0:
                return
            time.sleep(0.05)
        raise AssertionError("requests are still running")

    def stop(self, number=signal.SIGTERM):
        if self.process.poll() is None:
            self.process.send_signal(number)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return self.process.returncode


def stop_all(servers):
    """Every server ends with 0, and a sanitizer that it was built with has nothing to say."""
    for server in servers:
        code = server.stop()
        output = server.output()
        report = re.search(r"(WARNING: ThreadSanitizer|ERROR: \w+Sanitizer|runtime error:)", output)
        assert report is None, output[report.start():][:6000]
        assert code == 0, (code, output[-3000:])


@pytest.fixture(scope="session")
def launch(tmp_path_factory):
    """launch("--flag", ...) starts the server over the fake model."""
    running = []
    folder = tmp_path_factory.mktemp("servers")

    def start(*flags):
        with open(folder / f"{len(running)}.log", "w", encoding="utf-8") as log:
            running.append(Server([os.environ["NFP_SERVE_FAKE"], *map(str, flags)], log))
        return running[-1]

    yield start
    stop_all(running)


@pytest.fixture(scope="session")
def fake(launch):
    return launch()


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    """For client packages: nothing is sent to anybody but the server, and nothing is kept in the home folder."""
    old = dict(os.environ)
    os.environ.update(OPENAI_API_KEY="none", LITELLM_LOCAL_MODEL_COST_MAP="True", LANGSMITH_TRACING="false", DO_NOT_TRACK="1",
                      LLM_USER_PATH=str(tmp_path_factory.mktemp("llm")))
    yield
    os.environ.clear()
    os.environ.update(old)


@pytest.fixture(scope="session")
def launch_real(tmp_path_factory):
    """launch_real("--flag", ...) starts nestedfp serve on the demo model, or a `model` that is made of it,
    on NFP_DEVICE (cpu, cuda, auto). All that a test starts share a GPU until pytest ends, so each names its --kv-cache-memory.
    On a GPU sums depend on a request's company without --deterministic."""
    demo = os.environ.get("NFP_DEMO_MODEL")
    if not demo or not os.path.exists(demo):
        pytest.skip("NFP_DEMO_MODEL does not name the demo model (scripts/test fetches it)")
    running = []
    folder = tmp_path_factory.mktemp("real")

    def start(*flags, model=demo):
        assert "--kv-cache-memory" in flags
        command = [os.environ["NFP_PROGRAM"], "serve", model, "--port", "0",
                   "--device", os.environ.get("NFP_DEVICE", "cpu"), "--deterministic", "--served-model-name", "demo", *map(str, flags)]
        with open(folder / f"{len(running)}.log", "w", encoding="utf-8") as log:
            running.append(Server(command, log))
        return running[-1]

    yield start
    stop_all(running)


@pytest.fixture(scope="session")
def step_times(tmp_path_factory):
    """A table as a quiet machine's would be, where FP8 is faster: nothing is measured at the start, and what the server decides
    does not depend on what else runs here."""
    kinds = [{"prefill_tokens": n, "decode_sequences": 0} for n in (16, 64, 256)]
    kinds += [{"prefill_tokens": 0, "decode_sequences": n} for n in (1, 4, 16)]
    steps = [{"level": level, "prefill_context": 0, "decode_context": 64 if kind["decode_sequences"] else 0, "samples": 1,
              "ms": (8 + sum(kind.values())) * (1 if level == 0 else 0.6), **kind} for level in (0, 1) for kind in kinds]
    path = tmp_path_factory.mktemp("step-times") / "steps.json"
    path.write_text(json.dumps({"format": "nestedfp-step-times", "version": 1, "model": "demo", "device": "test", "weight_bytes": 1,
                                "max_step_tokens": 256, "max_sequences": 16, "kv_dtype": "f16", "steps": steps,
                                "levels": [{"precision": "fp16", "fp8_share": 0}, {"precision": "fp8", "fp8_share": 1}]}))
    return path


@pytest.fixture(scope="session")
def real(launch_real, step_times):
    # On a busy machine a grammar over the model's 49,152 tokens takes its time to compile.
    return launch_real("--max-num-seqs", 16, "--max-model-len", 2048, "--kv-cache-memory", "512MB", "--step-times", step_times,
                       "--grammar-compile-timeout", 200)
