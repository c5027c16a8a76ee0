#!/usr/bin/env python3
"""The nestedfp program from outside, on the tiny models: cli_test.py PROGRAM TINY_MODELS GOLDENS

Answers are compared with the float64 forward pass of tests/models/reference.py and with files as they lie on disk; bad
input must give one line that names the culprit and exit code 1 (wrong flags: 2).
"""

import json
import os
import shutil
import subprocess
import sys

try:
    import numpy as np
    import pytest
    from tokenizers import Tokenizer
except ImportError as missing:
    print(f"skipped: {missing.name} is not installed (scripts/test installs it)")
    sys.exit(77)

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "models"))
import reference
import safetensors_file
import tiny_tokenizer

PROGRAM, MODELS, GOLDENS = (os.environ.get("NFP_CLI_" + name, "") for name in ("PROGRAM", "MODELS", "GOLDENS"))
NAMES = ("llama-tied", "llama-headdim", "llama3-rope", "mistral", "llama-bias")
TEXT = tiny_tokenizer.TEXT


def nestedfp(*arguments, text=None, code=0):
    """Runs the program and returns what it printed; any exit code but `code` fails the test."""
    run = subprocess.run([PROGRAM, *map(str, arguments)], input=text or "", capture_output=True, text=True, timeout=300)
    assert run.returncode == code, f"exit code {run.returncode}, wanted {code}\n{run.stdout}\n{run.stderr}"
    return run


def nestedfp_json(*arguments, **options):
    return json.loads(nestedfp(*arguments, "--json", **options).stdout)


def refused(*arguments, naming, code=1):
    """The program must refuse: one line on stderr that holds each of `naming`, nothing on stdout."""
    run = nestedfp(*arguments, code=code)
    lines = run.stderr.strip().splitlines()
    assert len(lines) == 1, run.stderr
    for part in naming:
        assert part in lines[0], f"'{part}' is not in: {lines[0]}"
    assert run.stdout == ""


def model(name):
    return os.path.join(MODELS, name)


@pytest.fixture
def copy(tmp_path):
    """A copy of a tiny model that a test may damage."""

    def make(name):
        folder = tmp_path / name
        shutil.copytree(model(name), folder)
        return folder

    return make


def edit_json(path, **fields):
    """Sets fields of a JSON file; None removes one."""
    value = json.loads(path.read_text())
    for field, new in fields.items():
        if new is None:
            value.pop(field, None)
        else:
            value[field] = new
    path.write_text(json.dumps(value))


# ---- generate ----


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("precision", ["fp16", "fp8"])
def test_generate_chooses_the_likeliest_tokens(name, precision):
    source = reference.Model(model(name))
    weights, _ = reference.weights_in(source, precision)
    ids = Tokenizer.from_file(os.path.join(model(name), "tokenizer.json")).encode("A river runs").ids
    answer = nestedfp_json("generate", model(name), "-p", "A river runs", "-n", 6, "--precision", precision,
                           "--ignore-eos", "--dtype-kv", "f32")
    assert answer["usage"]["prompt_tokens"] == len(ids)
    for token in answer["tokens"]:
        assert token["precision"] == precision
        logits = reference.logits(source.config, weights, ids)[-1]
        # Another order of summation may swap what lies closer than this.
        assert logits[token["id"]] > logits.max() - 1e-3
        ids.append(token["id"])
    assert len(answer["tokens"]) == 6


def test_generate_reads_its_prompt_from_flag_file_or_standard_input(tmp_path):
    (tmp_path / "prompt.txt").write_text("The wheels")
    common = ("generate", model("llama-tied"), "-n", 4, "--ignore-eos")
    flag = nestedfp_json(*common, "-p", "The wheels")
    assert nestedfp_json(*common, "-f", tmp_path / "prompt.txt")["tokens"] == flag["tokens"]
    assert nestedfp_json(*common, text="The wheels")["tokens"] == flag["tokens"]


def test_generate_repeats_itself_for_a_seed_only():
    common = ("generate", model("llama-tied"), "-p", "The", "-n", 24, "--ignore-eos", "--temperature", 1)
    first, again, other = (nestedfp_json(*common, "--seed", seed)["tokens"] for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_generate_switches_precision_and_marks_it():
    common = ("generate", model("llama-tied"), "-p", "The", "-n", 12, "--ignore-eos", "--switch-every", 3)
    precisions = [token["precision"] for token in nestedfp_json(*common)["tokens"]]
    runs = [precisions[i : i + 3] for i in range(0, 12, 3)]
    assert all(len(set(run)) == 1 for run in runs)
    assert len({run[0] for run in runs}) == 2 and runs[0] != runs[1]
    shown = nestedfp(*common).stdout
    assert shown.count("[fp16]") == 2 and shown.count("[fp8]") == 2


def test_generate_does_not_depend_on_the_number_of_threads():
    common = ("generate", model("mistral"), "-p", TEXT[:200], "-n", 16, "--ignore-eos")
    assert nestedfp_json(*common, "--threads", 1)["tokens"] == nestedfp_json(*common, "--threads", 3)["tokens"]


# ---- perplexity ----

CTX = 32


def reference_distributions(name, precision):
    """Log-probabilities [scored, vocabulary] and the tokens scored, as llama.cpp's perplexity tool cuts a text."""
    source = reference.Model(model(name))
    weights, _ = reference.weights_in(source, precision)
    tokenizer = Tokenizer.from_file(os.path.join(model(name), "tokenizer.json"))
    ids = tokenizer.encode(TEXT).ids
    adds_bos = len(tokenizer.encode("").ids) > 0
    rows, targets = [], []
    for begin in range(0, len(ids) - CTX + 1, CTX):
        chunk = ids[begin : begin + CTX]
        if adds_bos:
            chunk = [0] + chunk[1:]
        logits = reference.logits(source.config, weights, chunk)
        peak = logits.max(axis=1, keepdims=True)
        logprobs = logits - peak - np.log(np.exp(logits - peak).sum(axis=1, keepdims=True))
        rows.append(logprobs[CTX // 2 : CTX - 1])
        targets += chunk[CTX // 2 + 1 :]
    return np.concatenate(rows), np.array(targets)


@pytest.mark.parametrize("name", ["llama-tied", "llama3-rope"])
def test_perplexity_is_that_of_the_reference(name, tmp_path):
    (tmp_path / "text").write_text(TEXT)
    common = ("perplexity", model(name), "--file", tmp_path / "text", "--ctx", CTX, "--dtype-kv", "f32")
    exact, targets = reference_distributions(name, "fp16")
    nll = -exact[np.arange(len(targets)), targets]
    result = nestedfp_json(*common, "--save-base", tmp_path / "base")
    assert result["scored_tokens"] == len(targets)
    assert result["perplexity"] == pytest.approx(np.exp(nll.mean()), rel=1e-5)
    # One standard error of the mean of the negative log-likelihoods, carried through the exponential.
    assert result["error"] == pytest.approx(np.exp(nll.mean()) * nll.std() / np.sqrt(len(nll)), rel=1e-2)

    rounded, _ = reference_distributions(name, "fp8")
    result = nestedfp_json(*common, "--precision", "fp8", "--kld-base", tmp_path / "base")
    divergence = (np.exp(exact) * (exact - rounded)).sum(axis=1)
    # The base keeps 16 bits of every probability.
    assert result["kld"]["mean"] == pytest.approx(divergence.mean(), rel=0.02, abs=1e-5)
    assert result["kld"]["p99"] == pytest.approx(np.percentile(divergence, 99), rel=0.1, abs=1e-4)
    assert result["kld"]["same_top"] == pytest.approx((exact.argmax(axis=1) == rounded.argmax(axis=1)).mean(), abs=0.005)
    assert result["kld"]["base_perplexity"] == pytest.approx(np.exp(nll.mean()), rel=1e-3)


# ---- bench ----


def test_bench_measures_each_precision():
    result = nestedfp_json("bench", model("llama-tied"), "--batch", 2, "--prompt", 16, "--generate", 4, "--repeats", 1)
    seen = {(row["test"], row["precision"]) for row in result["results"]}
    assert seen == {(test, precision) for test in ("prefill", "decode") for precision in ("fp16", "fp8")}
    assert all(row["tokens_per_s"] > 0 for row in result["results"])


# ---- bad input ----


def test_wrong_flags_are_usage_errors():
    assert "generate" in nestedfp("--help").stdout
    assert nestedfp("generate", model("llama-tied"), "-p", "x", "--no-such-flag", code=2).stdout == ""
    nestedfp("generate", model("llama-tied"), "-p", "x", "--precision", "fp9", code=2)
    nestedfp("no-such-verb", code=2)


def test_a_model_that_is_not_there(tmp_path):
    refused("generate", tmp_path / "none", "-p", "x", naming=[str(tmp_path / "none")])
    refused("generate", "someone/no-such-model", "-p", "x", naming=["someone/no-such-model", "download"])


def test_a_prompt_longer_than_the_context():
    refused("generate", model("llama-tied"), "-p", TEXT, "--ctx", 16, naming=["16"])


def test_a_truncated_tensor_file(copy):
    folder = copy("llama-tied")
    os.truncate(folder / "model.safetensors", 100_000)
    refused("generate", folder, "-p", "x", naming=["model.safetensors"])


def test_a_missing_shard(copy):
    folder = copy("mistral")
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused("generate", folder, "-p", "x", naming=["model-00002-of-00002.safetensors"])


def test_a_missing_tensor(copy):
    folder = copy("llama-tied")
    tensors = safetensors_file.read(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    safetensors_file.write(folder / "model.safetensors", tensors)
    refused("generate", folder, "-p", "x", naming=["model.layers.1.mlp.up_proj.weight"])


def test_a_tensor_with_a_nan(copy):
    folder = copy("llama-tied")
    tensors = {name: (dtype, array.copy()) for name, (dtype, array) in safetensors_file.read(folder / "model.safetensors").items()}
    tensors["model.layers.0.self_attn.q_proj.weight"][1][3, 4] = np.nan
    safetensors_file.write(folder / "model.safetensors", tensors)
    refused("generate", folder, "-p", "x", naming=["model.layers.0.self_attn.q_proj.weight", "NaN"])


def test_a_tensor_of_the_wrong_shape(copy):
    folder = copy("llama-tied")
    edit_json(folder / "config.json", intermediate_size=160)
    refused("generate", folder, "-p", "x", naming=["gate_proj", "160"])


@pytest.mark.parametrize("field, value, naming", [
    ("hidden_size", None, ["config.json", "hidden_size"]),
    ("num_attention_heads", 0, ["config.json", "num_attention_heads"]),
    ("num_hidden_layers", 10**12, ["config.json", "num_hidden_layers"]),
    ("rms_norm_eps", "small", ["config.json", "rms_norm_eps"]),
    ("rope_scaling", {"rope_type": "yarn", "factor": 2.0}, ["config.json", "rope_type", "yarn"]),
    ("architectures", ["BertModel"], ["config.json", "BertModel"]),
])
def test_a_bad_configuration(copy, field, value, naming):
    folder = copy("llama-tied")
    edit_json(folder / "config.json", **{field: value})
    refused("generate", folder, "-p", "x", naming=naming)


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b'{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}', b"\xff\xfe{}"])
def test_a_bad_tokenizer(copy, damage):
    folder = copy("llama-tied")
    (folder / "tokenizer.json").write_bytes(damage)
    refused("generate", folder, "-p", "x", naming=["tokenizer.json"])


def main():
    program, models, goldens = map(os.path.abspath, sys.argv[1:])
    if not os.path.exists(os.path.join(models, NAMES[0])):
        print("skipped: the tiny models were not made")
        sys.exit(77)
    os.environ.update(NFP_CLI_PROGRAM=program, NFP_CLI_MODELS=models, NFP_CLI_GOLDENS=goldens)
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", os.path.abspath(__file__)]))


if __name__ == "__main__":
    main()
