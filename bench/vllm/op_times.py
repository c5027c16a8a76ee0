"""op_times.py: host time of one call of the op, device time of both precisions beside torch's own FP16 product, and how
fast weights nest on the device. Prints one JSON object a line. (bench/call_times.cc: host time of the C interface.)"""

import json
import time

import torch

from nestedfp import _library
from nestedfp.vllm import op

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))  # Llama-3.1-8B


def emit(**fields) -> None:
    print("JSON", json.dumps(fields), flush=True)


def host_us(call, repeats: int = 2000) -> float:
    """Median of single calls; the queue of launches is emptied every 64, so that it never blocks."""
    times = []
    for i in range(repeats):
        if i % 64 == 0:
            torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - begin)
    torch.cuda.synchronize()
    times.sort()
    return times[len(times) // 2] / 1e3


def device_us(call, copies: int, repeats: int = 5) -> float:
    """By a graph of `copies` calls on different weights."""
    for i in range(copies):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(copies):
            call(i)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(repeats):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / copies)
    times.sort()
    return times[len(times) // 2]


def main() -> None:
    torch.manual_seed(0)
    emit(device=torch.cuda.get_device_name(), library=_library.library().nfp_version().decode(), torch=torch.__version__)
    weights = {}
    for n, k in SHAPES:
        copies = max(2, (320 << 20) // (2 * n * k))
        dense = [torch.randn(n, k, device="cuda").mul_(0.02).half() for _ in range(copies)]
        op.nest(dense[0])
        torch.cuda.synchronize()
        begin = time.perf_counter()
        planes = [op.nest(w) for w in dense]
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        emit(what="nest", n=n, k=k, matrices=copies, gb_s=round(copies * 2 * n * k / seconds / 1e9, 1))
        weights[n, k] = dense, planes
    ops = torch.ops.nestedfp
    for n, k in SHAPES:
        dense, planes = weights[n, k]
        for m in (1, 64, 1024):
            x, residual = (torch.randn(m, k, device="cuda").half() for _ in range(2))
            norm = torch.ones(k, device="cuda").half()
            p = planes[0]
            row = {"what": "product", "n": n, "k": k, "m": m}
            with torch.inference_mode():
                for name, precision in (("fp16", _library.FP16), ("fp8", _library.FP8)):
                    op.Step.forced = precision
                    row[f"{name}_op_host_us"] = round(
                        host_us(lambda: ops.linear.default(x, p.upper, p.lower, p.scale, None, n, k, p.join)), 2)
                    row[f"{name}_norm_op_host_us"] = round(host_us(lambda: ops.norm_linear.default(
                        x, residual, norm, 1e-5, p.upper, p.lower, p.scale, None, n, k, p.join, False)), 2)
                    row[f"{name}_us"] = round(device_us(
                        lambda i: ops.linear(x, planes[i].upper, planes[i].lower, planes[i].scale, None, n, k, p.join),
                        len(planes)), 2)
                row["torch_fp16_op_host_us"] = round(host_us(lambda: torch.nn.functional.linear(x, dense[0])), 2)
                row["torch_fp16_us"] = round(device_us(lambda i: torch.nn.functional.linear(x, dense[i]), len(dense)), 2)
            op.Step.forced = None
            emit(**row)


if __name__ == "__main__":
    main()
