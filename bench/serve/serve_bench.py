"""Measures the server over the model that costs nothing and writes one JSON file.

    serve_bench.py BUILD_FOLDER OUT.json

BUILD_FOLDER holds src/server/nestedfp-serve-fake and bench/serve_load (preset bench)."""

import json
import os
import re
import subprocess

import record


class Server:
    def __init__(self, program, *flags):
        self.process = subprocess.Popen([program, *map(str, flags)], stdout=subprocess.PIPE, text=True)
        self.port = re.search(r":(\d+)", self.process.stdout.readline()[7:]).group(1)

    def memory_kb(self, name):
        with open(f"/proc/{self.process.pid}/status", encoding="ascii") as f:
            return int(re.search(rf"{name}:\s+(\d+)", f.read()).group(1))

    def stop(self):
        self.process.terminate()
        assert self.process.wait(60) == 0


def main():
    build, out = record.arguments(__doc__, 2)[:2]
    record.check(out)
    server_program = os.path.join(build, "src/server/nestedfp-serve-fake")
    load_program = os.path.join(build, "bench/serve_load")

    def load(*flags):
        return json.loads(subprocess.run([load_program, *map(str, flags)], capture_output=True, text=True, check=True).stdout)

    results = {"what": "nestedfp-serve-fake (real HTTP server and engine, a model that costs nothing) and bench/serve_load on one machine",
               "command": "bench/serve/serve_bench.py BUILD OUT", **record.host(),
               "load_average_before": round(os.getloadavg()[0], 2)}

    # KV blocks for all of them at full length: a preempted stream would wait for another to end.
    server = Server(server_program, "--max-num-seqs", 4096, "--max-queue", 8192, "--step-us", 50000, "--kv-blocks", 131072)
    idle = server.memory_kb("VmRSS")
    streams = load("streams", "--port", server.port, "--streams", 4000, "--tokens", 400, "--period-ms", 50)
    streams["server_memory_above_idle_mb"] = round((server.memory_kb("VmHWM") - idle) / 1024, 1)
    streams["server_cpu_s"] = record.cpu_seconds(server.process.pid)
    results["streams_4000"] = streams
    server.stop()

    server = Server(server_program, "--max-num-seqs", 256)
    results["rate_64_streams"] = load("rate", "--port", server.port, "--streams", 64, "--tokens", 3000)
    results["first_byte"] = load("first", "--port", server.port, "--requests", 5000)
    server.stop()
    results["load_average_after"] = round(os.getloadavg()[0], 2)
    record.save(results, out)


if __name__ == "__main__":
    main()
