"""How long `nestedfp serve` takes from its start to its first answer, and how much memory the load takes.

    start_times.py NESTEDFP MODEL OUT.json [--repeats N] [FLAGS OF serve ...]

Starts the server N (5) times, one after the other, for example with --device cuda, or --load-format dummy for a folder with
config.json and tokenizer.json. Of each start, in seconds from the start of the process: the weights are in (the server's line
"weights"), /health says 200, the first token of a streamed answer is there; and as the server has it: loading, step times (measured
at a machine's first start with this model, then kept), KV cache and engine. Memory: the process's peak (VmHWM) until the weights
are in and in all, and the GPU's, sampled every 2 ms through NVML: what is in use over what was before the start, while nothing else
may use that GPU. The KV cache is taken after the weights are in, so the peak until then is that of the load.

Goals: ready within 2 s after the weights are in; the GPU's peak during the load at most the weights and 1 GB; for a model of 8B
parameters in the page cache 15 s to the first token and 8 s for the weights."""

import ctypes
import os
import re
import socket
import statistics
import subprocess
import sys
import threading
import time

import httpx

import record

GB = 10**9


class GpuMemory:
    """Bytes in use on the first GPU that CUDA shows; None where there is no NVML or no GPU."""

    class Info(ctypes.Structure):
        _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]

    def __init__(self):
        self.name, self.missing, self.device = None, None, ctypes.c_void_p()
        try:
            self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            self.missing = "libnvidia-ml.so.1 is not there"
            return
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
        found = self.nvml.nvmlInit_v2()
        if found == 0 and first.isdigit():
            found = self.nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(first)), ctypes.byref(self.device))
        elif found == 0:
            found = self.nvml.nvmlDeviceGetHandleByUUID(first.encode(), ctypes.byref(self.device))
        if found != 0:
            self.missing = f"NVML knows no GPU {first!r} (error {found})"
            return
        name = ctypes.create_string_buffer(96)
        self.nvml.nvmlDeviceGetName(self.device, name, ctypes.c_uint(len(name)))
        self.name = name.value.decode()

        self.idle = self.used()

    def wait_idle(self):
        """Until what an ended server held is free again, which would otherwise hide what the next one takes."""
        end = time.monotonic() + 30
        while not self.missing and self.used() > self.idle + (16 << 20):
            if time.monotonic() > end:
                sys.exit("another program uses the GPU; its memory cannot be told from the server's")
            time.sleep(0.05)

    def used(self):
        info = self.Info()
        return info.used if self.nvml.nvmlDeviceGetMemoryInfo(self.device, ctypes.byref(info)) == 0 else 0

    def sample(self, stop, into):
        while not stop.is_set():
            into.append((time.monotonic(), self.used()))
            time.sleep(0.002)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def peak_resident(pid):
    with open(f"/proc/{pid}/status", encoding="ascii") as f:
        return 1024 * int(re.search(r"VmHWM:\s+(\d+)", f.read()).group(1))


class Start:
    """One start of the server. `lines`: what it says, each with the time and the peak of its memory then."""

    def __init__(self, program, model, flags, gpu):
        self.gpu, self.samples, self.lines = gpu, [], []
        self.stop = threading.Event()
        gpu.wait_idle()
        sampler = threading.Thread(target=gpu.sample, args=(self.stop, self.samples))
        if not gpu.missing:
            sampler.start()
        self.url = f"http://127.0.0.1:{free_port()}"
        command = [program, "serve", model, "--port", self.url.rpartition(":")[2], "--served-model-name", "m", "--disable-log-requests",
                   *flags]
        self.began = time.monotonic()
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
        reader = threading.Thread(target=self.read)
        reader.start()
        try:
            self.result = self.measure()
        finally:
            self.process.terminate()
            self.process.wait()
            reader.join()
            self.stop.set()
            if not gpu.missing:
                sampler.join()

    def read(self):
        for line in self.process.stderr:
            now = time.monotonic()
            try:
                self.lines.append((now, peak_resident(self.process.pid), line.rstrip()))
            except (OSError, AttributeError):  # it has ended
                self.lines.append((now, 0, line.rstrip()))

    def said(self, pattern):
        """When the server wrote a line like this, its peak memory then, and the match."""
        end = time.monotonic() + 10
        while time.monotonic() < end:
            for at, resident, line in list(self.lines):
                if found := re.search(pattern, line):
                    return at, resident, found
            time.sleep(0.001)
        sys.exit(f"the server has not said {pattern!r}:\n" + "\n".join(line for *_, line in self.lines))

    def wait_healthy(self, client):
        while self.process.poll() is None:
            try:
                if client.get(self.url + "/health").status_code == 200:
                    return time.monotonic()
            except httpx.TransportError:
                pass
            time.sleep(0.002)
        sys.exit(f"the server ended with {self.process.returncode}:\n" + "\n".join(line for *_, line in self.lines))

    def first_token(self, client):
        body = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True,
                "return_token_ids": True}
        with client.stream("POST", self.url + "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if re.search(r'"token_ids":\s*\[\d', line):
                    return time.monotonic()
        sys.exit("the answer holds no token")

    def gpu_peak(self, until):
        used = [bytes_ for at, bytes_ in self.samples if at <= until]
        return max(used, default=self.gpu.idle) - self.gpu.idle

    def measure(self):
        with httpx.Client(timeout=600) as client:
            healthy = self.wait_healthy(client)
            first = self.first_token(client)
        weights_in, resident, weights = self.said(r"^weights +(\d+) bytes")
        took = self.said(r"^started +weights (\S+) s, step times (\S+) s, KV cache and engine (\S+) s")[2]
        result = {"weight_bytes": int(weights.group(1)), "to_weights_s": weights_in - self.began, "to_health_s": healthy - self.began,
                  "to_first_token_s": first - self.began, "ready_after_weights_s": healthy - weights_in,
                  "first_token_after_health_s": first - healthy, "weights_s": float(took.group(1)), "step_times_s": float(took.group(2)),
                  "kv_cache_and_engine_s": float(took.group(3)), "resident_peak_at_weights": resident,
                  "resident_peak": peak_resident(self.process.pid)}
        if not self.gpu.missing:
            # The line is read a little after it was written, and the KV cache follows at once.
            result["gpu_peak_at_weights"] = self.gpu_peak(weights_in - 0.002)
            result["gpu_peak"] = self.gpu_peak(first)
            result["gpu_samples_until_weights"] = sum(at <= weights_in for at, _ in self.samples)
        return {name: round(value, 4) for name, value in result.items()}


def goals(start):
    """Of one start: whether it met those that can be told of any model."""
    met = {"ready_2s_after_weights": start["ready_after_weights_s"] <= 2}
    if "gpu_peak_at_weights" in start:
        met["gpu_peak_of_load_weights_and_1GB"] = start["gpu_peak_at_weights"] <= start["weight_bytes"] + GB
    return met


def main():
    program, model, out, *flags = record.arguments(__doc__, 3)
    record.check(out)
    repeats = 5
    if "--repeats" in flags:
        at = flags.index("--repeats")
        if not (len(flags) > at + 1 and flags[at + 1].isdigit() and int(flags[at + 1]) > 0):
            sys.exit("--repeats: say how many, at least 1")
        repeats = int(flags[at + 1])
        del flags[at:at + 2]
    gpu = GpuMemory()
    if gpu.missing:
        print(f"GPU memory is NOT measured: {gpu.missing}", file=sys.stderr)
    starts = []
    for i in range(repeats):
        starts.append(Start(program, model, flags, gpu).result)
        starts[-1]["goals"] = goals(starts[-1])
        print(f"start {i + 1}: weights {starts[-1]['to_weights_s']:.2f} s, healthy {starts[-1]['to_health_s']:.2f} s, "
              f"first token {starts[-1]['to_first_token_s']:.2f} s", file=sys.stderr)
    medians = {name: round(statistics.median(s[name] for s in starts), 4) for name in starts[0] if name != "goals"}
    record.save({"command": " ".join(["bench/serve/start_times.py NESTEDFP MODEL OUT --repeats", str(repeats), *flags]),
                 "model": os.path.basename(os.path.normpath(model)), **record.host(), "gpu": gpu.name or f"not measured: {gpu.missing}",
                 "medians": medians, "starts": starts}, out)


main()
