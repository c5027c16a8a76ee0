#!/usr/bin/env python3
"""Damaged models: each gives one line that names the file, tensor or field, exit code 1, and nothing on stdout."""

import concurrent.futures
import json
import os
import re
import shutil
import subprocess
import sys
import unittest
import urllib.error
import urllib.request

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "models"))

try:
    import numpy as np
except ImportError:
    print("skipped: numpy is not installed (scripts/test installs it)")
    sys.exit(77)

import safetensors_file
from program import PROGRAM, TINY, Scratch, failure, main, run, run_json

WEIGHTS = "model.safetensors"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


class Damaged(Scratch):
    def copy(self, name="llama-tied"):
        self.copies = getattr(self, "copies", 0) + 1
        return shutil.copytree(os.path.join(TINY, name), self.path(f"{name}-{self.copies}"))

    def refused(self, model, *naming):
        text = self.path("text")
        with open(text, "w", encoding="utf-8") as file:
            file.write("a river runs " * 100)
        before = set(os.listdir(self.dir))
        for verb in (["generate", model, "-p", "x"], ["convert", model, self.path("out")], ["inspect", model],
                     ["perplexity", model, "--file", text, "--ctx", "32", "--save-base", self.path("out")]):
            line = failure(*verb)
            for part in naming:
                self.assertIn(part, line)
            self.assertEqual(set(os.listdir(self.dir)), before)

    def edit(self, path, **fields):
        """Sets fields of a JSON file; None removes one."""
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
        for field, new in fields.items():
            value.pop(field, None)
            if new is not None:
                value[field] = new
        with open(path, "w", encoding="utf-8") as file:
            json.dump(value, file)

    def tensors(self, model):
        found = safetensors_file.read(os.path.join(model, WEIGHTS))
        return {name: (dtype, array.copy()) for name, (dtype, array) in found.items()}

    def write(self, model, tensors):
        safetensors_file.write(os.path.join(model, WEIGHTS), tensors)


class Weights(Damaged):
    def test_truncated(self):
        for size in (0, 7, 100, 100_000):
            model = self.copy()
            os.truncate(os.path.join(model, WEIGHTS), size)
            self.refused(model, WEIGHTS)

    def test_a_header_that_says_too_much(self):
        for length in (2**63, 2**40, 2):
            model = self.copy()
            with open(os.path.join(model, WEIGHTS), "r+b") as file:
                file.write(length.to_bytes(8, "little"))
            self.refused(model, WEIGHTS)

    def test_overlapping_tensors(self):
        model = self.copy()
        path = os.path.join(model, WEIGHTS)
        with open(path, "rb") as file:
            data = file.read()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        other = "model.layers.1.self_attn.q_proj.weight"
        header[other]["data_offsets"] = header[Q_PROJ]["data_offsets"]
        text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
        with open(path, "wb") as file:
            file.write(data[:8] + text[:length] + data[8 + length :])
        self.refused(model, WEIGHTS)

    def test_a_missing_file(self):
        model = self.copy()
        os.remove(os.path.join(model, WEIGHTS))
        self.refused(model, model)

    def test_a_missing_shard(self):
        model = self.copy("mistral")
        os.remove(os.path.join(model, "model-00002-of-00002.safetensors"))
        self.refused(model, "model-00002-of-00002.safetensors")

    def test_an_index_that_leads_outside(self):
        model = self.copy("mistral")
        index = os.path.join(model, "model.safetensors.index.json")
        self.edit(index, weight_map={Q_PROJ: "../../../etc/passwd"})
        self.refused(model, "model.safetensors.index.json")

    def test_a_missing_tensor(self):
        model = self.copy()
        tensors = self.tensors(model)
        del tensors["model.layers.1.mlp.up_proj.weight"]
        self.write(model, tensors)
        self.assertIn("model.layers.1.mlp.up_proj.weight", failure("generate", model, "-p", "x"))

    def test_nan_and_infinity(self):
        for bad in (np.nan, np.inf):
            model = self.copy()
            tensors = self.tensors(model)
            tensors[Q_PROJ][1][3, 4] = bad
            self.write(model, tensors)
            self.refused(model, Q_PROJ)

    def test_integers_for_weights(self):
        model = self.copy()
        tensors = self.tensors(model)
        tensors[Q_PROJ] = ("U8", np.zeros(tensors[Q_PROJ][1].shape, np.uint8))
        self.write(model, tensors)
        self.assertIn(Q_PROJ, failure("generate", model, "-p", "x"))

    def test_another_shape_than_the_configuration_says(self):
        model = self.copy()
        self.edit(os.path.join(model, "config.json"), intermediate_size=160)
        line = failure("generate", model, "-p", "x")
        self.assertIn("gate_proj", line)


class Configuration(Damaged):
    def test_fields(self):
        for field, value, *naming in (
            ("hidden_size", None, "hidden_size"),
            ("num_attention_heads", 0, "num_attention_heads"),
            ("num_key_value_heads", 3, "num_key_value_heads"),
            ("num_hidden_layers", 10**12, "num_hidden_layers"),
            ("vocab_size", -1, "vocab_size"),
            ("rms_norm_eps", "small", "rms_norm_eps"),
            ("rope_scaling", {"rope_type": "ntk", "factor": 2.0}, "rope_type", "ntk"),
            ("architectures", ["BertModel"], "BertModel"),
            ("architectures", ["DeepseekV3ForCausalLM"], "DeepseekV3ForCausalLM", "kv_lora_rank"),
            ("architectures", ["GptOssForCausalLM"], "GptOssForCausalLM", "attention sinks"),
            ("architectures", ["PhimoeForCausalLM"], "PhimoeForCausalLM", "router_jitter_noise"),
            ("attention_chunk_size", 8192, "attention_chunk_size"),
            ("layer_types", ["full_attention", "sliding_attention"], "layer_types", "layer 1"),
            ("is_causal", False, "is_causal"),
            ("quantization_config", {"quant_method": "fp8", "fmt": "e5m2"}, "fmt", "e5m2"),
        ):
            model = self.copy()
            self.edit(os.path.join(model, "config.json"), **{field: value})
            line = failure("generate", model, "-p", "x")
            for part in ("config.json", *naming):
                self.assertIn(part, line)

    def test_missing_and_extra_tensors(self):
        model = self.copy()
        whole = self.tensors(model)
        gone = [name for name in whole if ".1.mlp." in name]
        self.write(model, {name: tensor for name, tensor in whole.items() if name not in gone})
        self.refused(model, *gone)
        self.assertIn(gone[0], failure("convert", model, self.path("out"), "--calibrate", "none"))
        self.write(model, {**whole, "model.layers.0.mlp.extra.weight": whole[Q_PROJ], "lm_head.weight": whole["model.embed_tokens.weight"]})
        _, told = run("generate", model, "-p", "x", "-n", "1")
        self.assertIn("model.layers.0.mlp.extra.weight", told)
        self.assertNotIn("lm_head", told)  # tied, and the embedding again

    def test_inspect_says_what_is_missing(self):
        model = self.copy()
        whole = self.tensors(model)
        self.assertIsNone(run_json("inspect", model)["incomplete"])
        gone = [name for name in whole if ".1." in name]
        self.write(model, {name: tensor for name, tensor in whole.items() if name not in gone})
        said = json.loads(run("inspect", model, "--json", code=1)[0])["incomplete"]
        for part in (f"{len(gone)} of the tensors that config.json implies are missing", gone[0], "download"):
            self.assertIn(part, said)
        out, err = run("inspect", model, code=1)
        self.assertIn("hidden", out)  # what there is
        self.assertIn(f"nestedfp: error: {said}", err)
        self.refused(model, said)
        name = "model.layers.1.mlp.up_proj.weight"
        self.write(model, {**whole, name: (whole[name][0], whole[name][1][:-1])})
        self.assertIn(name, json.loads(run("inspect", model, "--json", code=1)[0])["incomplete"])

    def test_dtypes_that_are_not_read(self):
        """No layer needs such a tensor; one that a layer needs is named with its dtype."""
        model = self.copy()
        whole = self.tensors(model)

        def spoil(name):
            self.write(model, {**whole, name: ("U8", np.zeros((4, 12), np.uint8))})
            path = os.path.join(model, WEIGHTS)
            with open(path, "rb") as file:
                data = file.read()
            length = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + length])
            header[name]["dtype"], header[name]["shape"] = "F4", [12, 8]
            text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
            with open(path, "wb") as file:
                file.write(len(text).to_bytes(8, "little") + text + data[8 + length :])

        extra = "model.layers.0.mlp.extra"
        spoil(extra)
        plain = run_json("generate", self.copy(), "-p", "x", "-n", "4")
        answer, told = run("generate", model, "-p", "x", "-n", "4", "--json")
        self.assertEqual(json.loads(answer)["tokens"], plain["tokens"])
        self.assertIn(extra, told)
        self.assertEqual(run_json("inspect", model)["left_out"], [extra])
        _, told = run("convert", model, self.path("nested"), "--calibrate", "none")
        self.assertIn(f"leaves out 1 tensor of dtypes that are not written: '{extra}' (F4)", told)
        again = run_json("generate", self.path("nested"), "-p", "x", "-n", "4")
        self.assertEqual(again["tokens"], plain["tokens"])
        for name in (Q_PROJ, "model.norm.weight"):
            spoil(name)
            self.refused(model, f"'{name}'", "F4")

    def test_numbers_that_only_python_writes(self):
        model = self.copy()
        plain = run_json("generate", model, "-p", "x", "-n", "4")
        config = os.path.join(model, "config.json")
        self.edit(config, attention_dropout=float("nan"), bounds=[float("inf"), float("-inf")])
        for name in ("generation_config.json", "tokenizer_config.json"):
            path = os.path.join(model, name)
            if not os.path.exists(path):
                with open(path, "w", encoding="utf-8") as file:
                    file.write("{}")
            self.edit(path, penalty_alpha=float("inf"))
        self.assertEqual(run_json("generate", model, "-p", "x", "-n", "4")["tokens"], plain["tokens"])
        run("inspect", model)
        run("inspect", config)
        run("convert", model, self.path("nested"), "--calibrate", "none")
        with open(os.path.join(self.path("nested"), "config.json"), encoding="utf-8") as file:
            written = file.read()
        self.assertIn('"attention_dropout": NaN', written)
        self.assertEqual(json.loads(written)["bounds"], [float("inf"), float("-inf")])
        self.assertEqual(run_json("generate", self.path("nested"), "-p", "x", "-n", "4")["tokens"], plain["tokens"])
        shutil.rmtree(self.path("nested"))
        for value, shown in ((float("nan"), "NaN"), (float("-inf"), "-Infinity")):
            self.edit(config, rms_norm_eps=value)
            line = failure("generate", model, "-p", "x")
            for part in ("config.json", f"'rms_norm_eps' is {shown}"):
                self.assertIn(part, line)

    def test_a_tied_head_that_is_another(self):
        model = self.copy()
        tensors = self.tensors(model)
        dtype, embedding = tensors["model.embed_tokens.weight"]
        late = embedding.copy()
        late[-2, -1] += 1  # one weight of one row
        for head in (-embedding, late, embedding[:-1]):
            tensors["lm_head.weight"] = (dtype, head)
            self.write(model, tensors)
            line = failure("generate", model, "-p", "x")
            self.assertIn("tie_word_embeddings", line)
            self.assertIn("lm_head.weight", line)

    def test_a_tied_head_in_another_dtype(self):
        model = self.copy()
        tensors = self.tensors(model)
        tensors["lm_head.weight"] = ("F32", tensors["model.embed_tokens.weight"][1].astype(np.float32))
        self.write(model, tensors)
        run("generate", model, "-p", "x", "-n", "1")
        tensors["lm_head.weight"][1][-2, -1] += 1
        self.write(model, tensors)
        self.assertIn("tie_word_embeddings", failure("generate", model, "-p", "x"))

    def test_keys_beyond_fp16(self):
        model = self.copy("llama-bias")
        tensors = self.tensors(model)
        dtype, bias = tensors["model.layers.1.self_attn.k_proj.bias"]
        bias[:] = 60000  # of both parts of a pair, which a rotation adds
        self.write(model, tensors)
        prompt = "The engine ran well and the children were glad of it."
        line = failure("generate", model, "-p", prompt, "-n", "8", "--ignore-eos")
        for part in ("layer 1", "FP16", "--dtype-kv f32"):
            self.assertIn(part, line)
        answer = run_json("generate", model, "-p", prompt, "-n", "8", "--ignore-eos", "--dtype-kv", "f32")
        self.assertEqual(len(answer["tokens"]), 8)

    def test_logits_that_are_not_finite(self):
        model = self.copy()
        tensors = self.tensors(model)
        _, norm = tensors["model.norm.weight"]
        tensors["model.norm.weight"] = ("F32", np.full(norm.shape, 3e38, "<f4"))
        self.write(model, tensors)
        text = self.path("text")
        with open(text, "w", encoding="utf-8") as file:
            file.write("a river runs " * 100)
        line = "the logits are not finite: in layer 1, the last, behind its keys and values, or in the final norm"
        self.assertIn(line, failure("generate", model, "-p", "x"))
        for more in ((), ("--save-base", self.path("base"))):
            self.assertIn(line, failure("perplexity", model, "--file", text, "--ctx", "32", *more))
        self.assertFalse(os.path.exists(self.path("base")))

    def test_a_server_goes_on_where_a_request_overflows(self):
        """Token 7 alone has a number in channel 3 of the residual stream, which the last layer's MLP makes too large."""
        model = self.copy()
        tensors = self.tensors(model)
        for name, (dtype, array) in tensors.items():
            array = safetensors_file.to_f32(dtype, array).astype("<f4")
            if name == "model.embed_tokens.weight":
                array[:, 3] = 0
                array[7, 3] = 100
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                array[3] = 0
            if name.endswith("layers.1.post_attention_layernorm.weight"):
                array[3] = 1e25
            tensors[name] = ("F32", array)
        self.write(model, tensors)
        server = subprocess.Popen([PROGRAM, "serve", model, "--port", "0", "--served-model-name", "m", "--max-model-len", "128"],
                                  stderr=subprocess.PIPE, text=True)
        try:
            ready = next(line for line in server.stderr if line.startswith("ready"))
            url = re.search(r"http://\S+", ready).group(0)

            def ask(prompt):
                body = {"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True,
                        "logit_bias": {"7": -100}}
                request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(),
                                                 {"Content-Type": "application/json"})
                try:
                    with urllib.request.urlopen(request, timeout=60) as answer:
                        return json.load(answer)["choices"][0]["text"]
                except urllib.error.HTTPError as refused:
                    return refused.code, json.load(refused)["error"]["message"]

            alone = ask([5, 6, 8])
            with concurrent.futures.ThreadPoolExecutor(6) as pool:
                answers = list(pool.map(ask, [[5, 6, 8], [5, 6, 7], [5, 6, 8], [7], [5, 6, 8], [5, 6, 8]]))
            for i, answer in enumerate(answers):
                if i in (1, 3):
                    self.assertEqual(answer[0], 400)
                    self.assertIn("the logits are not finite: in layer 1, the last", answer[1])
                else:
                    self.assertEqual(answer, alone)
            with urllib.request.urlopen(url + "/health", timeout=60) as health:
                self.assertEqual(health.status, 200)
            with urllib.request.urlopen(url + "/metrics", timeout=60) as metrics:
                self.assertRegex(metrics.read().decode(), r'request_success_total\{[^}]*finished_reason="error"\} 2\n')
        finally:
            server.terminate()
            server.communicate()

    def test_a_chat_template_nested_a_million_deep(self):
        for opening, closing in (("[", "]"), ('{"a":', "}")):
            model = self.copy()
            with open(os.path.join(model, "tokenizer_config.json"), "w", encoding="utf-8") as file:
                file.write('{"chat_template": [' + opening * 10**6 + "1" + closing * 10**6 + "]}")
            self.assertIn("tokenizer_config.json", failure("generate", model, "-p", "x"))

    def test_no_json(self):
        for text in (b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000):
            model = self.copy()
            with open(os.path.join(model, "config.json"), "wb") as file:
                file.write(text)
            self.assertIn("config.json", failure("generate", model, "-p", "x"))

    def test_absent(self):
        model = self.copy()
        os.remove(os.path.join(model, "config.json"))
        self.refused(model, "config.json")


class TokenizerFile(Damaged):
    def test_damaged(self):
        for text in (b"", b"{", b"[1]", b"\xff\xfe{}", b"[" * 100_000,
                     b'{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
                     b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}',
                     b'{"model": {"type": "Unigram", "vocab": []}}'):
            model = self.copy()
            with open(os.path.join(model, "tokenizer.json"), "wb") as file:
                file.write(text)
            self.assertIn("tokenizer.json", failure("generate", model, "-p", "x"))

    def test_absent(self):
        model = self.copy()
        os.remove(os.path.join(model, "tokenizer.json"))
        self.assertIn("tokenizer.json", failure("generate", model, "-p", "x"))
        with open(os.path.join(model, "tokenizer.model"), "wb") as file:
            file.write(b"x")
        self.assertIn("has tokenizer.model and no tokenizer.json, which", failure("generate", model, "-p", "x"))


class Places(Damaged):
    def test_not_there(self):
        self.refused(self.path("none"), self.path("none"))
        self.assertIn("download", failure("generate", "someone/no-such-model", "-p", "x"))

    @unittest.skipIf(os.geteuid() == 0, "root may read everything")
    def test_not_readable(self):
        model = self.copy()
        os.chmod(os.path.join(model, WEIGHTS), 0)
        self.refused(model, WEIGHTS)

    def test_a_gguf_file_that_is_none(self):
        for text in (b"", b"GGUF", b"GGUF" + b"\xff" * 60, b"no model at all" * 10):
            path = self.path("model.gguf")
            with open(path, "wb") as file:
                file.write(text)
            self.refused(path, "model.gguf")

    def test_chat_template_without_end(self):
        model = self.copy()
        self.edit(os.path.join(model, "tokenizer_config.json"),
                  chat_template="{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}")
        # A conversation goes on after an answer that failed; a script learns of it in the end.
        self.assertIn("template", failure("chat", model, "-n", "2", stdin="hi\n/quit\n"))


if __name__ == "__main__":
    main()
