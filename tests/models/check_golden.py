#!/usr/bin/env python3
"""Checks the tiny models and the goldens against each other without PyTorch: check_golden.py MODELS GOLDEN

The generator's weight files have the checksums that the goldens were made from, and our float64 forward pass gives the
golden logits to within the FP32 error recorded beside them.
"""

import base64
import glob
import hashlib
import json
import os
import sys

try:
    import numpy as np
except ImportError:
    print("skipped: numpy is not installed (scripts/test installs it)")
    sys.exit(77)

import reference


def decoded(text):
    return np.frombuffer(base64.b64decode(text), "<f4")


def check(golden, folder):
    """A list of what is wrong."""
    wrong = []
    total = hashlib.sha256()
    for path in sorted(glob.glob(os.path.join(folder, "*.safetensors"))):
        with open(path, "rb") as file:
            total.update(file.read())
    if total.hexdigest() != golden["weights_sha256"]:
        wrong.append("the weight files are not those that the golden was made from")
    model = reference.Model(folder)
    for precision in ("fp16", "fp8"):
        weights, stats = reference.weights_in(model, precision)
        entry = golden[precision]
        # The recorded error is the largest over all positions; rounding of the golden itself is far below 1 % of it.
        tolerance = 1.01 * entry["fp32_error"]
        if stats != golden["nesting"]:
            wrong.append(f"nesting is {stats}, the golden has {golden['nesting']}")
        for sequence in entry["sequences"]:
            values = reference.logits(model.config, weights, sequence["tokens"])
            difference = np.abs(values[-1] - decoded(sequence["last_logits"])).max()
            if precision == "fp16":
                rows = np.arange(len(values))
                difference = max(difference, np.abs(values[rows, sequence["argmax"]] - decoded(sequence["max_logit"])).max())
            if not difference <= tolerance:
                wrong.append(f"{precision}, {len(sequence['tokens'])} tokens: differs by {difference:.3g}, allowed {tolerance:.3g}")
        tokens = list(entry["greedy"]["tokens"])
        for token in entry["greedy"]["continuation"]:
            if int(reference.logits(model.config, weights, tokens)[-1].argmax()) != token:
                wrong.append(f"{precision}: the greedy continuation differs after {len(tokens)} tokens")
                break
            tokens.append(token)
    return wrong


def main():
    models, goldens = sys.argv[1:]
    paths = sorted(glob.glob(os.path.join(goldens, "*.json")))
    failed = not paths
    for path in paths:
        with open(path, encoding="utf-8") as file:
            golden = json.load(file)
        wrong = check(golden, os.path.join(models, golden["model"]))
        print(f"{golden['model']}: {'; '.join(wrong) or 'right'}")
        failed = failed or bool(wrong)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
