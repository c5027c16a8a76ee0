"""serve_ratios.py FILE...: what serve_figures.py measured of engines that ran apart, in one row for each item."""

import json
import sys


def main() -> None:
    starts: dict[str, dict] = {}
    rows: dict[tuple, dict] = {}
    for path in sys.argv[1:]:
        for line in open(path):
            found = json.loads(line)
            if found.get("event") == "started":
                starts[found["engine"]] = found
            if "what" in found and "event" not in found:
                key = (found["what"], found["batch"], found["tokens"], found["answer"])
                rows.setdefault(key, {}).update({name: value for name, value in found.items()
                                                 if name.startswith(("vllm ", "nestedfp "))})
    for name, start in starts.items():
        print("JSON", json.dumps({"engine": name, **{key: start[key] for key in ("start_s", "weights_gib", "kv_blocks", "capture_s")
                                                     if key in start}}))
    for (what, batch, tokens, answer), row in rows.items():
        ratios = {f"{mode} / vllm": round(row[f"nestedfp {mode}"] / row[f"vllm {mode}"], 3) for mode in ("fp16", "fp8")
                  if {f"nestedfp {mode}", f"vllm {mode}"} <= set(row)}
        if {"nestedfp fp16", "nestedfp fp8"} <= set(row):
            ratios["fp8 / fp16 mode"] = round(row["nestedfp fp8"] / row["nestedfp fp16"], 3)
            if "nestedfp alternating" in row:
                ratios["alternating / mean"] = round(
                    2 * row["nestedfp alternating"] / (row["nestedfp fp16"] + row["nestedfp fp8"]), 3)
        print("JSON", json.dumps({"what": what, "batch": batch, "tokens": tokens, "answer": answer, **row, "ratios": ratios}))


if __name__ == "__main__":
    main()
