"""`vllm serve` with the plugin's scheduler and worker, over HTTP, with CUDA graphs: what a request asks for, and metrics.
On a Hopper GPU; skips elsewhere. Environment: test_serving.py."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request
from pathlib import Path

try:
    import torch
    import vllm  # noqa: F401

    HAVE_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
except ImportError:
    HAVE_GPU = False

MODELS = Path(os.environ.get("NESTEDFP_NESTED_MODELS", ""))
SECONDS = float(os.environ.get("NESTEDFP_TEST_SECONDS", "220"))
PROMPT = [7 + 11 * i % 480 for i in range(100)]


@unittest.skipUnless(HAVE_GPU and MODELS.name, "needs vLLM, a Hopper GPU and NESTEDFP_NESTED_MODELS")
class Http(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        try:
            import vllm.entrypoints.openai.api_server  # noqa: F401
        except ImportError as missing:
            raise unittest.SkipTest(f"vLLM's server cannot be imported here: {missing}") from None
        folder = Path(os.environ.get("NESTEDFP_TEST_OUT") or tempfile.mkdtemp())
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        cls.url = f"http://127.0.0.1:{port}"
        cls.log = folder / "http.log"
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(MODELS / "llama"), "--served-model-name", "m",
                   "--host", "127.0.0.1", "--port", str(port), "--dtype", "float16", "--max-model-len", "256",
                   "--max-num-seqs", "16", "--max-num-batched-tokens", "512", "--kv-cache-memory-bytes", str(1 << 28),
                   "--gpu-memory-utilization", "0.05", "--generation-config", "vllm", "--enable-prompt-tokens-details",
                   "--cudagraph-capture-sizes", "1", "2", "4", "8", "16",
                   "--quantization", "nestedfp", "--scheduler-cls", "nestedfp.vllm.scheduler.Scheduler",
                   "--worker-cls", "nestedfp.vllm.worker.Worker", "--additional-config", '{"nestedfp": {"policy": "fp16"}}']
        with cls.log.open("w") as sink:
            cls.server = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True)
        end = time.monotonic() + SECONDS
        while True:
            try:
                urllib.request.urlopen(cls.url + "/health", timeout=2).close()
                return
            except OSError:
                time.sleep(0.3)
            if cls.server.poll() is not None or time.monotonic() > end:
                cls.tearDownClass()
                raise RuntimeError("the server did not start:\n" + "\n".join(cls.log.read_text().splitlines()[-30:]))

    @classmethod
    def tearDownClass(cls):
        if cls.server.poll() is None:
            os.killpg(cls.server.pid, signal.SIGTERM)
            try:
                cls.server.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(cls.server.pid, signal.SIGKILL)

    def complete(self, prompt, tokens=8, **fields):
        """Log-probabilities of the answer's tokens, and tokens of the prompt that the cache had."""
        body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 1, "ignore_eos": True,
                "vllm_xargs": fields}
        request = urllib.request.Request(self.url + "/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            got = json.load(answer)
        details = got["usage"].get("prompt_tokens_details") or {}
        return got["choices"][0]["logprobs"]["token_logprobs"], details.get("cached_tokens") or 0

    def counter(self, name, **labels):
        """Summed over the lines of that name with those labels; None where there is none."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=10) as answer:
            lines = re.findall(rf"^{re.escape(name)}{{(.*)}} (\S+)$", answer.read().decode(), re.M)
        found = [float(value) for text, value in lines if all(f'{k}="{v}"' in text for k, v in labels.items())]
        return sum(found) if found else None

    def test_requests_choose_and_are_counted(self):
        exact, _ = self.complete(PROMPT, nestedfp_precision="exact")
        fast, _ = self.complete(PROMPT, nestedfp_precision="fast")
        auto, cached = self.complete(PROMPT)  # FP16 steps over what the fast one left in the cache
        again, shared = self.complete(PROMPT, nestedfp_precision="exact")
        print(f"cached: {cached}, exact: {shared}; first of exact, fast, auto: {exact[0]:.5f} {fast[0]:.5f} {auto[0]:.5f}")
        self.assertNotEqual(exact, fast)
        self.assertGreater(cached, 0)
        self.assertGreater(shared, 0)  # of the exact one before
        self.assertLess(max(abs(a - b) for a, b in zip(exact, again)), 0.05)
        time.sleep(0.5)
        steps = {precision: self.counter("nestedfp:steps_total", precision=precision) for precision in ("fp16", "fp8")}
        print(f"steps: {steps}")
        self.assertGreater(steps["fp16"], 15)
        self.assertGreaterEqual(steps["fp8"], 8)
        self.assertGreater(self.counter("nestedfp:precision_switches_total"), 1)
        self.assertGreater(self.counter("nestedfp:step_seconds_total", precision="fp16"), 0)
        self.assertIsNotNone(self.counter("vllm:num_requests_running"))

    def test_prefixes_of_exact_requests_are_their_own(self):
        """Tokens of a prompt that the cache had: those that requests of the same kind left there."""
        first, second = ([start + 13 * i % 470 for i in range(100)] for start in (11, 29))
        for tier, whole in (("auto", False), ("exact", False), ("exact", True), ("auto", True), ("fast", True)):
            _, cached = self.complete(first, nestedfp_precision=tier)
            (self.assertGreater if whole else self.assertEqual)(cached, 0, tier)
        for tier, whole in (("exact", False), ("fast", False), ("auto", True), ("exact", True)):
            _, cached = self.complete(second, nestedfp_precision=tier)
            (self.assertGreater if whole else self.assertEqual)(cached, 0, tier)

    def test_targets(self):
        before = self.counter("nestedfp:slo_steps_total") or 0
        self.complete(PROMPT[:50], 20, slo_ttft_ms=60000, slo_tpot_ms=60000)
        time.sleep(0.5)
        self.assertEqual(self.counter("nestedfp:slo_steps_total") or 0, before)
        self.complete(PROMPT[:50], 20, slo_tpot_ms=0.001)  # cannot be kept: FP8 from the second token on
        time.sleep(0.5)
        self.assertGreaterEqual(self.counter("nestedfp:slo_steps_total"), before + 15)
        self.assertEqual(self.counter("nestedfp:slo_requests_total"), 2)
        self.assertEqual(self.counter("nestedfp:slo_attained_total"), 1)


if __name__ == "__main__":
    unittest.main(verbosity=1)
