#!/usr/bin/env python3
"""Checkpoints in other forms than a text model's 16-bit weights: test_checkpoints.py PROGRAM TINY_MODELS"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import urllib.request

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "models"))

from program import FP8_MODELS, PROGRAM, TINY, Scratch, failure, main, run, run_json

import numpy as np
import safetensors_file


class Fp8Already(Scratch):
    def test_it_runs_and_says_that_there_is_no_original(self):
        self.assertEqual(len(FP8_MODELS), 3)
        for model in FP8_MODELS:
            tokens = {}
            for precision in ("fp16", "fp8", "fp8-w8a8"):
                out, err = run("generate", model, "-p", "a b c", "-n", "8", "--ignore-eos", "--json", "--precision",
                               precision)
                self.assertIn("FP8 already", err)
                tokens[precision] = [token["id"] for token in json.loads(out)["tokens"]]
            if "block" not in model:
                scalar = {**os.environ, "NESTEDFP_CPU": "scalar"}
                one, two = (run("generate", model, "-p", "a b c", "-n", "8", "--ignore-eos", "-q", "--precision",
                                precision, env=scalar)[0] for precision in ("fp16", "fp8"))
                self.assertEqual(one, two, model)
            self.assertIn("FP8 already", run("inspect", model)[0])
            self.assertIn("matrices with a scale", json.loads(run("inspect", model, "--json")[0])["stored_fp8"])
            self.assertIn("FP8 already", failure("convert", model, self.path("out"), "--calibrate", "none"))
            self.assertFalse(os.path.exists(self.path("out")))

    def test_codes_have_no_neighbour_to_choose_and_rounded_blocks_do(self):
        for model in FP8_MODELS:
            arguments = ("generate", model, "-p", "a", "-n", "2", "--calibrate", "self", "--calibrate-tokens", "64",
                         "--precision", "fp8")
            if "block" in model:
                run(*arguments)
            else:
                self.assertIn("leave out --calibrate", failure(*arguments, code=2))


class ByteOrderMarks(Scratch):
    def test_its_json_files_may_begin_with_one(self):
        marked = shutil.copytree(os.path.join(TINY, "qwen3"), self.path("marked"))
        files = list(pathlib.Path(marked).glob("*.json"))
        self.assertGreaterEqual(len(files), 5)  # the index of its shards, too
        for file in files:
            file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
        arguments = ("-p", "a b c", "-n", "8", "-q")
        self.assertEqual(run("generate", marked, *arguments)[0],
                         run("generate", os.path.join(TINY, "qwen3"), *arguments)[0])


class Shapes(Scratch):
    def test_tensors_of_another_shape_are_told_before_anything_is_written(self):
        with open(os.path.join(TINY, "llama-tied", "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        wrong = ({"intermediate_size": 2 * config["intermediate_size"]}, {"hidden_size": 2 * config["hidden_size"]},
                 {"vocab_size": config["vocab_size"] + 1})
        for change in wrong:
            copy, nested = self.path("copy"), self.path("nested")
            shutil.copytree(os.path.join(TINY, "llama-tied"), copy)
            with open(os.path.join(copy, "config.json"), "w", encoding="utf-8") as file:
                json.dump(config | change, file)
            said = failure("convert", copy, nested)
            self.assertRegex(said, r"tensor '.*' has \d+ (rows|columns|elements), but config.json implies \d+")
            self.assertEqual(said, failure("generate", copy, "-p", "a"))
            self.assertEqual(os.listdir(self.dir), ["copy"])
            shutil.rmtree(copy)


class LeftOut(Scratch):
    def test_tensors_that_the_configuration_does_not_imply_do_not_count(self):
        for name in ("llama-tied", "phi3"):
            folder, copy = os.path.join(TINY, name), self.path(name)
            shutil.copytree(folder, copy)
            tensors = {}
            for path in sorted(pathlib.Path(copy).glob("*.safetensors")):
                tensors.update(safetensors_file.read(path))
                path.unlink()
            pathlib.Path(copy, "model.safetensors.index.json").unlink(missing_ok=True)
            extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", np.zeros(8, np.float32))}
            for tensor, value in tensors.items():
                if tensor.startswith("model.layers.0."):
                    extra[tensor.replace("layers.0.", "layers.77.")] = value
            if name == "llama-tied":
                extra["lm_head.weight"] = tensors["model.embed_tokens.weight"]
            safetensors_file.write(os.path.join(copy, "model.safetensors"), {**tensors, **extra})
            before, after = (run_json("inspect", model) for model in (folder, copy))
            self.assertEqual(before["left_out"], [])
            if name == "llama-tied":
                self.assertEqual(set(after["left_out"]), set(extra))
            for field in ("parameters", "linear_parameters", "fp16_bytes", "by_type", "linear", "rows", "matrices"):
                self.assertEqual(after[field], before[field], f"{name}: {field}")
            self.assertIn(f"left out: {len(after['left_out'])} tensors", run("inspect", copy)[0])


class Headless(Scratch):
    """Embedding models are saved without the head that makes logits."""

    def embedding(self, model):
        with open(self.path("log"), "w+", encoding="utf-8") as log:
            with subprocess.Popen([PROGRAM, "serve", model, "--port", "0", "--device", "cpu", "--max-model-len", "32",
                                   "--precision", "fp16"], stdout=log, stderr=log) as server:
                try:
                    found = None
                    while found is None:
                        self.assertIsNone(server.poll())
                        time.sleep(0.05)
                        said = pathlib.Path(log.name).read_text(encoding="utf-8")
                        found = re.search(r"(http://[0-9.]+:\d+)/v1\)", said)
                    body = json.dumps({"model": model, "input": "a b c"}).encode()
                    request = urllib.request.Request(found[1] + "/v1/embeddings", body, {"Content-Type": "application/json"})
                    with urllib.request.urlopen(request, timeout=60) as answer:
                        return json.load(answer)["data"][0]["embedding"], said
                finally:
                    server.terminate()

    def test_it_gives_the_whole_models_embeddings_and_no_text(self):
        for name in ("mistral", "llama-tied"):
            folder, out = os.path.join(TINY, name), self.path(name)
            shutil.copytree(folder, out)
            config = json.loads(pathlib.Path(folder, "config.json").read_text(encoding="utf-8"))
            tensors = {}
            for path in sorted(pathlib.Path(out).glob("model*.safetensors")):
                tensors.update(safetensors_file.read(path))
                path.unlink()
            pathlib.Path(out, "model.safetensors.index.json").unlink(missing_ok=True)
            self.assertEqual("lm_head.weight" in tensors, name == "mistral")
            tensors = {key.removeprefix("model."): value for key, value in tensors.items() if key != "lm_head.weight"}
            safetensors_file.write(os.path.join(out, "model.safetensors"), tensors)
            expected, said = self.embedding(folder)
            self.assertNotIn("no head", said)
            whole, headless = config["architectures"], [config["architectures"][0].replace("ForCausalLM", "Model")]
            for architectures in (headless, whole) if name == "mistral" else (headless,):
                pathlib.Path(out, "config.json").write_text(json.dumps({**config, "architectures": architectures}))
                got, said = self.embedding(out)
                self.assertEqual(got, expected)
                self.assertIn("/v1/embeddings alone", said)
                self.assertIn("has no head", failure("generate", out, "-p", "a"))
                self.assertIn("has no head", failure("perplexity", out, "--file", os.path.join(out, "config.json")))
                self.assertEqual(run_json("inspect", out)["architecture"], headless[0])
            nested = self.path("nested-" + name)
            run("convert", out, nested, "--calibrate", "none")
            self.assertEqual(self.embedding(nested)[0], expected)
            self.assertIn("has no head", failure("generate", nested, "-p", "a"))
            # A head that such a model has all the same is nothing to it.
            tensors["lm_head.weight"] = ("F16", np.zeros((config["vocab_size"], config["hidden_size"]), np.float16))
            safetensors_file.write(os.path.join(out, "model.safetensors"), tensors)
            pathlib.Path(out, "config.json").write_text(json.dumps({**config, "architectures": headless}))
            got, said = self.embedding(out)
            self.assertEqual(got, expected)
            self.assertIn("ignored: 'lm_head.weight'", said)


class TextTowers(Scratch):
    """A multimodal checkpoint, of which the text model is read."""

    def wrap(self, folder, architecture, prefix):
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            text = json.load(file)
        outside = {key: text.pop(key) for key in ("bos_token_id", "eos_token_id", "torch_dtype", "tie_word_embeddings")}
        text.pop("architectures")
        out = self.path(architecture)
        os.mkdir(out)
        tensors = {}
        for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
            for name, value in safetensors_file.read(path).items():
                tensors[prefix + name] = value
        zeros = np.zeros((3, 4), np.float32)
        for name in ("vision_tower.encoder.layers.0.weight", "multi_modal_projector.linear_1.weight"):
            tensors[name] = ("F32", zeros)
        safetensors_file.write(os.path.join(out, "model.safetensors"), tensors)
        config = {"architectures": [architecture], "model_type": architecture.lower(), "text_config": text,
                  "vision_config": {"hidden_size": 4}, **outside}
        pathlib.Path(out, "config.json").write_text(json.dumps(config))
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(os.path.join(folder, name), out)
        return out

    def test_it_is_the_text_model(self):
        for name, architecture in (("gemma3", "Gemma3ForConditionalGeneration"),
                                   ("mistral", "Mistral3ForConditionalGeneration")):
            folder = os.path.join(TINY, name)
            wrapped = self.wrap(folder, architecture, "language_model.")
            for precision in ("fp16", "fp8"):
                arguments = ("-p", "a b c", "-n", "12", "--ignore-eos", "--json", "--precision", precision)
                expected = json.loads(run("generate", folder, *arguments)[0])
                out, err = run("generate", wrapped, *arguments)
                self.assertEqual(json.loads(out)["tokens"], expected["tokens"])
            self.assertIn("multi_modal_projector (1 tensors", err)
            self.assertIn("vision_tower (1 tensors", err)
            plan = json.loads(run("inspect", os.path.join(wrapped, "config.json"), "--json")[0])
            facts = json.loads(run("inspect", folder, "--json")[0])
            self.assertEqual(plan["parameters"], facts["parameters"])
            nested = self.path("nested-" + name)
            run("convert", wrapped, nested, "--calibrate", "none")
            self.assertEqual(json.loads(run("generate", nested, *arguments)[0])["tokens"], expected["tokens"])


if __name__ == "__main__":
    main()
