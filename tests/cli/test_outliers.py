#!/usr/bin/env python3
"""Weights over 1.75, in the patterns that trained models have them: test_outliers.py PROGRAM TINY_MODELS

The paper leaves matrices with such weights in FP16 (its exceptions); row exponents nest them without loss. What `inspect`
and `convert` report of them, by GEMM type and by matrix of those that are multiplied together, is compared with what was
put in.
"""

import os
import re
import shutil
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "models"))

from program import TINY, Scratch, main, run, run_json

import make_tiny_models
import numpy as np
import safetensors_file

ATTENTION, MLP = "self_attn.{}_proj", "mlp.{}_proj"
TYPES = {"w1": "gate/up", "w3": "gate/up", "w2": "down",  # of Mixtral's experts
         "q": "q/k/v", "k": "q/k/v", "v": "q/k/v", "o": "o", "gate": "gate/up", "up": "gate/up", "down": "down"}


def row(matrix, size):
    """An output channel that is large as a whole."""
    matrix[5] = np.round(matrix[5] * 2.0**8) / 2.0**8 * 8
    matrix[5, 0] = size


def column(matrix, size):
    """An input channel that is large for every output: every row needs an exponent."""
    matrix[:] = np.round(matrix * 2.0**14) / 2.0**14
    matrix[:, 3] = np.where(np.arange(len(matrix)) % 2, size, -size)


def spikes(matrix, size):
    """A few single weights, as early layers' down matrices have them."""
    matrix[:] = np.round(matrix * 2.0**14) / 2.0**14
    matrix[[1, 7, 20], [2, 9, 30]] = (size, -size, size)


def broken(matrix, size):
    """A row that no exponent serves: its smallest weight is FP16's smallest number."""
    matrix[4, 0:2] = (size, 2.0**-24)


# Pattern, size, layer, matrices; as the paper found them: some types of GEMM in some layers.
PUT_IN = [(row, 2.5, 0, ("q",)), (column, 1.875, 0, ("down",)), (spikes, 9.25, 1, ("down",)), (column, 3.5, 1, ("v",)),
          (spikes, 2.0, 1, ("up",)), (row, 6.0, 1, ("o",))]
BROKEN = [(broken, 5.0, 0, ("v",)), (broken, 5.0, 0, ("up",)), (broken, 5.0, 1, ("o",))]


def parts_of(weights, config):
    """The same arrays by the names that `inspect` has: parts of fused matrices by themselves."""
    heads, dim = config["num_attention_heads"], config.get("head_dim")
    dim = dim or config["hidden_size"] // heads
    query, key_value = heads * dim, config["num_key_value_heads"] * dim
    out = {}
    for name, array in weights.items():
        if name.endswith("qkv_proj.weight"):
            ends, letters = (query, query + key_value), "qkv"
        elif name.endswith("gate_up_proj.weight"):
            ends, letters = (len(array) // 2,), ("gate", "up")
        else:
            out[name] = array
            continue
        for letter, part in zip(letters, np.split(array, ends)):
            out[name.replace("qkv_proj", f"{letter}_proj").replace("gate_up_proj", f"{letter}_proj")] = part
    return out


class Outliers(Scratch):
    def make(self, base, put_in):
        """A tiny model with outliers; the matrices that have them."""
        folder = shutil.copytree(os.path.join(TINY, base), self.path(f"{base}-{len(put_in)}"))
        for name in os.listdir(folder):
            if name.endswith((".safetensors", ".safetensors.index.json")):
                os.remove(os.path.join(folder, name))
        weights = make_tiny_models.make_weights(base)
        config = make_tiny_models.full_config(base)
        for tensor in make_tiny_models.linear_names(config):
            weights[tensor] = np.clip(weights[tensor], -1, 1)
        matrices = parts_of(weights, config)
        names = set()
        for pattern, size, layer, parts in put_in:
            for part in parts:
                if part not in "qkvo" and make_tiny_models.has_experts(config, layer):
                    # One expert's, and not the first's.
                    name = make_tiny_models.expert_names(config, layer, 2)[("gate", "up", "down").index(part)]
                else:
                    block = ATTENTION if part in "qkvo" else MLP
                    name = f"model.layers.{layer}.{block.format(part)}.weight"
                pattern(matrices[name], size)
                names.add(name)
        tensors = {name: ("F16", values.astype(np.float16)) for name, values in weights.items()}
        safetensors_file.write(os.path.join(folder, "model.safetensors"), tensors)
        return folder, names, parts_of({name: array.astype(np.float64) for name, (_, array) in tensors.items()}, config)

    def test_exceptions_are_reported_where_weights_are(self):
        for base in ("qwen2-heads16", "llama-tied", "gemma2", "smollm3", "phi3", "phi4-mini", "qwen3-yarn",
                     "gemma3-pattern", "mixtral-full", "qwen3-moe-window"):
            folder, names, weights = self.make(base, PUT_IN)
            report = run_json("inspect", folder)
            exceptions = {m["name"] for m in report["matrices"] if not m["nested_by_paper_rule"]}
            self.assertEqual(exceptions - {"lm_head.weight"}, names)
            for matrix in report["matrices"]:
                largest = np.abs(weights[matrix["name"]]).max(axis=1)
                needed = {}
                for size in largest[largest > 1.75]:
                    exponent = str(int(np.ceil(np.log2(size / 1.75))))
                    needed[exponent] = needed.get(exponent, 0) + 1
                self.assertEqual(matrix["rows_by_exponent"], needed, matrix["name"])
                self.assertTrue(matrix["nested"], matrix["name"])
                self.assertEqual(matrix["largest"], largest.max())
                fused = re.sub(r"[qkv]_proj", "qkv_proj", re.sub(r"(gate|up)_proj", "gate_up_proj", matrix["name"]))
                is_part = base.startswith("phi") and fused != matrix["name"]
                self.assertEqual(matrix["part_of"], fused if is_part else None)
            by_type = {entry["type"]: entry for entry in report["by_type"]}
            for kind in set(TYPES.values()):
                count = sum(TYPES[name.split(".")[-2].removesuffix("_proj")] == kind for name in names)
                self.assertEqual(by_type[kind]["exceptions_by_paper_rule"], count, kind)
                self.assertEqual(by_type[kind]["nested_by_row_exponents"], count, kind)
                self.assertEqual(by_type[kind]["dense"], 0)
            text = run("inspect", folder)[0]
            self.assertIn(f"exceptions by the paper's rule: {len(exceptions)}", text)
            nested = self.path("nested-" + base)
            out = run("convert", folder, nested, "--calibrate", "none")[0]
            self.assertIn(" 0 linear layers kept dense" if report["matrices"][-1]["type"] != "lm_head"
                          else " 1 linear layers kept dense", out)
            # And what was nested is the same model.
            arguments = ("-p", "a b c", "-n", "12", "--ignore-eos", "-q")
            plain = run("generate", folder, *arguments, "--baseline", "f16")[0]
            for model in (folder, nested):
                self.assertEqual(run("generate", model, *arguments)[0], plain, model)

    def test_what_does_not_nest_is_named_with_what_is_multiplied_together(self):
        folder, names, _ = self.make("qwen2-heads16", BROKEN)
        report = run_json("inspect", folder)
        dense = {m["name"]: m["reason"] for m in report["matrices"] if not m["nested"]}
        self.assertEqual(set(dense), names)
        for reason in dense.values():
            self.assertIn("row 4: largest |w| 5 needs exponent 2, which changes weight", reason)
        out = run("convert", folder, self.path("nested"), "--calibrate", "none")[0].splitlines()
        told = {line.split()[1]: line for line in out if line.startswith("  dense: ")}
        first, second = "model.layers.0.", "model.layers.1."
        groups = {first + "self_attn.v_proj.weight": [first + f"self_attn.{part}_proj.weight" for part in "qk"],
                  first + "mlp.up_proj.weight": [first + "mlp.gate_proj.weight"],
                  second + "self_attn.o_proj.weight": []}
        self.assertEqual(set(told) - {"lm_head.weight"}, {*groups, *sum(groups.values(), [])})
        for name, together in groups.items():
            self.assertNotIn("together", told[name])
            for other in together:
                self.assertIn(f"together with {name}", told[other])


if __name__ == "__main__":
    main()
