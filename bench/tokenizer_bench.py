"""Our tokenizer beside the `tokenizers` package: the same tokenizer.json files and text, one thread each, in turns.

    bench/tokenizer_bench.py TOKENIZER_BENCH FOLDER TEXT.txt [--rounds N] [--output bench/results/tokenizer.json]

FOLDER holds tokenizer.json files (tests/tokenizer/oracle.py leaves them in its work folder). Prints a table. The figures
are processor time, the best of all rounds: what else the machine does can only add to it.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"

import tokenizers  # noqa: E402

STAGES = ("encode_whole_s", "encode_lines_s", "decode_s", "load_s")


def times(rounds, work):
    result = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        result.append(time.process_time() - start)
    return result


def package(path, text, rounds):
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    lines = [line + "\n" for line in text.split("\n")]
    lines[-1] = lines[-1][:-1]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return {
        "tokens": len(ids),
        "line_tokens": sum(len(tokenizer.encode(line, add_special_tokens=False)) for line in lines),
        "encode_whole_s": times(rounds, lambda: tokenizer.encode(text, add_special_tokens=False)),
        "encode_lines_s": times(rounds, lambda: [tokenizer.encode(l, add_special_tokens=False) for l in lines]),
        # encode_batch spares the loop in Python; with one thread it is the package's best way.
        "encode_lines_batch_s": times(rounds, lambda: tokenizer.encode_batch_fast(lines, add_special_tokens=False)),
        "decode_s": times(rounds, lambda: tokenizer.decode(ids)),
        "load_s": times(rounds, lambda: tokenizers.Tokenizer.from_file(str(path))),
    }


def ours(program, path, text_path, rounds):
    output = subprocess.run([program, path, text_path, str(rounds)], check=True, capture_output=True, text=True)
    return json.loads(output.stdout)


def cpu_model():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("text", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--output", type=pathlib.Path)
    arguments = parser.parse_args()
    text = arguments.text.read_bytes().decode()
    report = {
        "benchmark": "tokenizer",
        "date": datetime.date.today().isoformat(),
        "command": "bench/tokenizer_bench.py tokenizer_bench FOLDER " + arguments.text.name,
        "cpu": cpu_model(),
        "threads": 1,
        "clock": "processor time of the process",
        "tokenizers_version": tokenizers.__version__,
        "text": arguments.text.name,
        "text_bytes": len(text.encode()),
        "rounds": arguments.rounds,
        "results": {},
    }
    print(f"{'':20s} {'whole text, MB/s':>24s} {'by lines, MB/s':>32s} {'decode, ms':>16s} {'load, ms':>16s}")
    for path in sorted(arguments.folder.glob("*.json")):
        if arguments.only and path.stem not in arguments.only:
            continue
        result = {"ours": ours(arguments.program, path, arguments.text, arguments.rounds),
                  "tokenizers": package(path, text, arguments.rounds)}
        a, b = result["ours"], result["tokenizers"]
        if (a["tokens"], a["line_tokens"]) != (b["tokens"], b["line_tokens"]):
            sys.exit(f"{path}: {a['tokens']} and {a['line_tokens']} tokens, but the package says {b['tokens']} and "
                     f"{b['line_tokens']}")
        best = {who: {stage: min(result[who][stage]) for stage in result[who] if stage.endswith("_s")} for who in result}
        result["best"] = best
        result["speedup"] = {stage: round(best["tokenizers"][stage] / best["ours"][stage], 2) for stage in STAGES}
        report["results"][path.stem] = result
        mb = report["text_bytes"] / 1e6
        x, y = best["ours"], best["tokenizers"]
        print(f"{path.stem:20s} {mb / x['encode_whole_s']:10.1f} vs {mb / y['encode_whole_s']:10.1f} "
              f"{mb / x['encode_lines_s']:10.1f} vs {mb / y['encode_lines_s']:6.1f} ({mb / y['encode_lines_batch_s']:6.1f}) "
              f"{x['decode_s'] * 1e3:8.1f} vs {y['decode_s'] * 1e3:5.1f} {x['load_s'] * 1e3:8.1f} vs {y['load_s'] * 1e3:5.1f}",
              flush=True)
    if arguments.output:
        temporary = arguments.output.with_suffix(".tmp")
        temporary.write_text(json.dumps(report, indent=1) + "\n")
        temporary.replace(arguments.output)


if __name__ == "__main__":
    main()
