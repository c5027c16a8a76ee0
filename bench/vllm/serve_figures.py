"""serve_figures.py --model DIR --out FILE: decode steps, time to first token and throughput of vLLM with nestedfp (both
precisions from one engine, and alternating step by step) beside stock vLLM in FP16 and FP8, interleaved.

The engines are processes that start together and stay; each measures alone, in turn, while the others wait. Prints one
JSON object a line, and writes them to FILE. Weights are vLLM's dummy ones (--load-format dummy).

Where a GPU has no room for all of them (a large model and many requests): --engines ENGINE --kv-gib 0 measures one, which
then takes nine tenths of the GPU, and serve_ratios.py FILE... puts such files together. An engine alone ends one mode's
repeats before the next mode's.

--start-only cold,warm starts each engine of --engines alone, one after the other, with an empty compile cache and again
with what it left there, and measures only that and how many kernels each start compiled (new_kernels). The first start
of all reads files that the others find in memory: name an engine once more to have it without."""

import argparse
import atexit
import contextlib
import datetime
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ENGINES = {
    "stock fp16": {},
    "stock fp8": {"quantization": "fp8"},
    "nestedfp": {"quantization": "nestedfp", "scheduler_cls": "nestedfp.vllm.scheduler.Scheduler",
                 "worker_cls": "nestedfp.vllm.worker.Worker",
                 "additional_config": {"nestedfp": {"policy": "alternate:1"}}},
}
# The same engine in other ways, where --also names them: without dependent launch, without that of Inductor's kernels,
# with norms that Inductor compiles, and with vLLM's attention.
VARIANTS = {"independent": {}, "inductor waits": {"compilation_config": {"inductor_compile_config": {"triton.enable_pdl": False}}},
            "norms apart": {}, "flash attention": {"attention_backend": "FLASH_ATTN"}}
VARIANT_ENVIRONMENT = {"independent": {"NESTEDFP_INDEPENDENT_START": "1"}, "norms apart": {"NESTEDFP_NORMS_APART": "1"}}
ENGINES.update({name: {**ENGINES["nestedfp"], **more} for name, more in VARIANTS.items()})
# name: engine, what its requests ask for
MODES = {"vllm fp16": ("stock fp16", None), "vllm fp8": ("stock fp8", None), "nestedfp fp16": ("nestedfp", "exact"),
         "nestedfp fp8": ("nestedfp", "fast"), "nestedfp alternating": ("nestedfp", "auto"),
         **{f"{name} {mode}": (name, tier) for name in VARIANTS for mode, tier in (("fp16", "exact"), ("fp8", "fast"))}}


# What vLLM and the plugin say while they start. Milestones: seconds from the start of the process, a log's are whole.
MILESTONES = {"arguments read": "non-default args", "model known": "Resolved architecture", "engine's process": "Initializing a V1",
              "model loaded": "Model loading took", "compiled": "torch.compile took", "found compiled": "Directly load",
              "memory known": "GPU KV cache size", "graphs captured": "Graph capturing finished",
              "kernels warm": "Kernel JIT monitor activated", "engine made": "init engine"}
SECONDS = {"load_s": r"Model loading took .*?([\d.]+) seconds", "dynamo_s": r"Dynamo bytecode transform time: ([\d.]+)",
           "inductor_s": r"Compiling a graph for compile range .*? takes ([\d.]+)",
           "compile_s": r"torch.compile took ([\d.]+)", "init_s": r"init engine .*? took ([\d.]+)"}


def start_of(text: str, began: float) -> dict:
    """What a log says about a start at `began`."""
    found = {name: max(map(float, values)) for name, pattern in SECONDS.items() if (values := re.findall(pattern, text))}
    milestones = {}
    for name, words in MILESTONES.items():
        stamp = re.search(r"(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d) [^\n]*" + re.escape(words), text)
        if stamp:
            at = datetime.datetime(datetime.datetime.fromtimestamp(began).year, *map(int, stamp.groups()))
            milestones[name] = round(at.timestamp() - began, 1)
    own = re.findall(r"nestedfp: ((?:of loading|capturing)[^\n]*)", text)
    return {**found, "milestones_s": milestones, **({"own": own} if own else {})}


def engine_main(arguments) -> None:
    out = sys.stdout
    sys.stdout = sys.stderr
    import numpy as np
    from vllm import LLM, SamplingParams

    vocab = json.load(open(arguments.model + "/config.json"))["vocab_size"]
    extra = {"hf_overrides": {"num_hidden_layers": arguments.layers}} if arguments.layers else {}
    begin = time.time()
    if arguments.kv_gib:
        extra.update(kv_cache_memory_bytes=int(arguments.kv_gib * (1 << 30)), gpu_memory_utilization=0.25)
    else:
        extra.update(gpu_memory_utilization=0.9)
    llm = LLM(model=arguments.model, skip_tokenizer_init=True, load_format="dummy", dtype=arguments.dtype,
              enable_prefix_caching=False, max_model_len=arguments.context, max_num_seqs=arguments.sequences,
              max_num_batched_tokens=8192,
              tensor_parallel_size=arguments.tensor_parallel, enable_expert_parallel=arguments.expert_parallel,
              generation_config="vllm", seed=0, **extra, **ENGINES[arguments.engine])
    engine = llm.llm_engine
    stamps: list[float] = []
    step = engine.step

    def timed_step():
        result = step()
        stamps.append(time.perf_counter())
        return result

    engine.step = timed_step
    rng = np.random.default_rng(1)

    def run(batch: int, tokens: int, answer: int, tier: str | None) -> tuple[float, list[float]]:
        prompts = [{"prompt_token_ids": ids} for ids in rng.integers(0, vocab, size=(batch, tokens)).tolist()]
        extra = {"extra_args": {"nestedfp_precision": tier}} if tier else {}
        parameters = SamplingParams(temperature=0, ignore_eos=True, max_tokens=answer, detokenize=False, **extra)
        stamps.clear()
        begin = time.perf_counter()
        results = llm.generate(prompts, parameters, use_tqdm=False)
        seconds = time.perf_counter() - begin
        assert all(len(r.outputs[0].token_ids) == answer for r in results)
        return seconds, [(b - a) * 1e3 for a, b in zip(stamps, stamps[1:])]

    import torch

    config = engine.vllm_config
    now = time.time()
    print(json.dumps({"ready_s": round(now - arguments.began, 1), "start_s": round(now - begin, 1), "v2_runner": config.use_v2_model_runner,
                      "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
                      "kv_blocks": config.cache_config.num_gpu_blocks,
                      "device_used_gib": round((torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]) / 2**30, 1)}),
          file=out, flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        seconds, gaps = run(ask["batch"], ask["tokens"], ask["answer"], ask["tier"])
        middle = gaps[len(gaps) // 4:-4] if len(gaps) > 16 else gaps
        print(json.dumps({"seconds": seconds, "step_ms": statistics.median(middle) if middle else None,
                          "mean_step_ms": statistics.fmean(middle) if middle else None,
                          "steps_ms": [round(gap, 3) for gap in gaps] if ask.get("steps") else None}), file=out, flush=True)


class Engine:
    def __init__(self, name: str, arguments, caches: str | None = None, log: str | None = None):
        """caches: a folder for what is compiled. log: in place of the engine's name."""
        self.began = time.time()
        command = [sys.executable, __file__, "--model", arguments.model, "--engine", name, "--kv-gib", str(arguments.kv_gib),
                   "--tensor-parallel", str(arguments.tensor_parallel), "--dtype", arguments.dtype,
                   "--context", str(arguments.context), "--sequences", str(arguments.sequences), "--began", str(self.began)]
        command += ["--layers", str(arguments.layers)] if arguments.layers else []
        command += ["--expert-parallel"] if arguments.expert_parallel else []
        self.log = open(f"{arguments.out}.{(log or name).replace(' ', '-')}.log", "w")
        environment = {**os.environ, **VARIANT_ENVIRONMENT.get(name, {})}
        if caches:
            environment.update(VLLM_CACHE_ROOT=f"{caches}/vllm", TRITON_CACHE_DIR=f"{caches}/triton",
                               TORCHINDUCTOR_CACHE_DIR=f"{caches}/inductor")
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=self.log, text=True, start_new_session=True)

    def line(self) -> dict:
        text = self.process.stdout.readline()
        if not text:
            raise RuntimeError(f"an engine ended with {self.process.wait()}: see {self.log.name}")
        return json.loads(text)

    def logged(self) -> dict:
        """What vLLM says about its start."""
        with open(self.log.name, errors="replace") as log:
            text = log.read()
        weights = re.findall(r"Model loading took ([\d.]+) GiB", text)
        captures = re.findall(r"Graph capturing finished in (\d+) secs", text)
        return {"weights_gib": float(weights[-1]) if weights else None, "capture_s": sum(map(int, captures)),
                **start_of(text, self.began)}

    def end(self) -> None:
        """With the processes that hold its GPU memory."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def ask(self, **fields) -> dict:
        self.process.stdin.write(json.dumps(fields) + "\n")
        self.process.stdin.flush()
        return self.line()


def kernels_in(caches: str) -> dict[str, set[str]]:
    """Compiled kernels by the cache that has them: what a start with full caches adds was not found there."""
    found: dict[str, set[str]] = {}
    for path in Path(caches).rglob("*.cubin"):
        found.setdefault(str(path.relative_to(caches)).split("/")[0], set()).add(str(path))
    return found


def measure_starts(names: list[str], arguments, end: float, emit) -> None:
    """Of each engine alone."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for number, name in enumerate(names):
            caches = tempfile.mkdtemp(dir=folder)
            for kind in arguments.start_only.split(","):
                if time.time() > end:
                    emit(event="left out", engine=name, caches=kind)
                    continue
                if kind == "cold":
                    caches = tempfile.mkdtemp(dir=folder)
                before = kernels_in(caches)
                engine = Engine(name, arguments, caches, f"{number} {name} {kind}")
                try:
                    emit(event="started", engine=name, caches=kind, **engine.line(), **engine.logged(),
                         new_kernels={place: len(found - before.get(place, set()))
                                      for place, found in kernels_in(caches).items()})
                except RuntimeError as error:
                    emit(event="failed", engine=name, caches=kind, error=str(error))
                finally:
                    engine.end()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", default="figures.jsonl")
    parser.add_argument("--engine")
    parser.add_argument("--kv-gib", type=float, default=12, help="0: what nine tenths of the GPU have room for")
    parser.add_argument("--decode", default="1,8,32,64")
    parser.add_argument("--ttft", default="1024,4000")
    parser.add_argument("--throughput", default="", help="BATCH:PROMPT:ANSWER, ...")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engines", default="stock fp16,stock fp8,nestedfp")
    parser.add_argument("--modes", default="", help="only these: " + ", ".join(list(MODES)[:5]) + " (default: all of the engines)")
    parser.add_argument("--also", default="", help="variants of nestedfp's engine: " + ", ".join(VARIANTS))
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--expert-parallel", action="store_true", help="a mixture's experts whole on one GPU or another, not cut")
    parser.add_argument("--layers", type=int, help="of the model, fewer than it has: steps are then that much shorter")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--context", type=int, default=4096, help="vLLM's max_model_len")
    parser.add_argument("--sequences", type=int, default=256, help="vLLM's max_num_seqs")
    parser.add_argument("--steps", action="store_true", help="write the times between the steps of throughput too")
    parser.add_argument("--start-only", help="cold, warm, or several of them with commas between: of compile caches")
    parser.add_argument("--began", type=float, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--wait-for", help="a file: measure once it is there")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds from the start")
    arguments = parser.parse_args()
    if arguments.engine:
        return engine_main(arguments)
    began = time.time()
    sink = open(arguments.out, "w")

    def emit(**fields) -> None:
        text = json.dumps({"t": round(time.time() - began, 1), **fields})
        print("JSON", text, flush=True)
        sink.write(text + "\n")
        sink.flush()

    if unknown := [mode for mode in map(str.strip, arguments.modes.split(",")) if mode and mode not in MODES]:
        parser.error(f"--modes: {', '.join(unknown)}: must be of {', '.join(MODES)}")
    wanted = [name.strip() for name in f"{arguments.engines},{arguments.also}".split(",") if name.strip()]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if arguments.start_only:
        return measure_starts(wanted, arguments, began + arguments.budget, emit)
    engines = {name: Engine(name, arguments) for name in wanted}
    atexit.register(lambda: [engine.end() for engine in engines.values()])
    alive = {}
    for name, engine in engines.items():
        try:
            emit(event="started", engine=name, **engine.line(), **engine.logged())
            alive[name] = engine
        except RuntimeError as error:
            emit(event="failed", engine=name, error=str(error))
    while arguments.wait_for and not os.path.exists(arguments.wait_for):
        time.sleep(0.2)
    emit(event="measuring")
    only = [mode.strip() for mode in arguments.modes.split(",") if mode.strip()]
    modes_of_all = {mode: (alive[name], tier) for mode, (name, tier) in MODES.items()
                    if name in alive and (not only or mode in only)}

    def item(what: str, batch: int, tokens: int, answer: int, repeats: int, value, without: str = "-",
             most_to_warm: int = 1 << 30, steps: bool = False) -> None:
        modes = {mode: engine for mode, engine in modes_of_all.items() if not mode.endswith(without)}
        if time.time() - began > arguments.budget:
            emit(event="left out", what=what, batch=batch, tokens=tokens)
            return
        found: dict[str, list[float]] = {mode: [] for mode in modes}
        turns = [(repeat, mode) for repeat in range(repeats + 1) for mode in modes]
        if len(alive) == 1:  # as a stock engine alone, which has one mode: FP8 behind FP16 finds a GPU out of power
            turns.sort(key=lambda turn: list(modes).index(turn[1]))
        for repeat, mode in turns:
            engine, tier = modes[mode]
            if not repeat:  # warms up
                engine.ask(batch=min(batch, most_to_warm), tokens=tokens, answer=min(answer, 8), tier=tier)
                continue
            got = engine.ask(batch=batch, tokens=tokens, answer=answer, tier=tier, steps=steps)
            found[mode].append(value(got))
            if steps:
                emit(event="steps", mode=mode, batch=batch, tokens=tokens, answer=answer, steps_ms=got["steps_ms"])
        medians = {mode: round(statistics.median(values), 3) for mode, values in found.items()}
        ratios = {}
        for mode in ("fp16", "fp8"):
            if f"vllm {mode}" in medians and f"nestedfp {mode}" in medians:
                ratios[mode] = round(medians[f"nestedfp {mode}"] / medians[f"vllm {mode}"], 3)
        if {"nestedfp alternating", "nestedfp fp16", "nestedfp fp8"} <= set(medians):
            ratios["alternating / mean of both"] = round(
                2 * medians["nestedfp alternating"] / (medians["nestedfp fp16"] + medians["nestedfp fp8"]), 3)
        emit(what=what, batch=batch, tokens=tokens, answer=answer, **medians, ratios=ratios,
             all={mode: [round(v, 3) for v in values] for mode, values in found.items()})

    for tokens in map(int, filter(None, arguments.ttft.split(","))):
        item("time to first token, ms", 1, tokens, 1, max(arguments.repeats, 15), lambda got: got["seconds"] * 1e3)
    for batch in map(int, filter(None, arguments.decode.split(","))):
        item("decode step, ms", batch, 128, 96, arguments.repeats, lambda got: got["mean_step_ms"])
    for text in filter(None, arguments.throughput.split(",")):
        batch, tokens, answer = map(int, text.split(":"))
        item("output tokens/s", batch, tokens, answer, 1, lambda got: batch * answer / got["seconds"], "alternating", 16,
             arguments.steps)


if __name__ == "__main__":
    main()
