#!/usr/bin/env python3
"""nestedfp pull and nestedfp models, against a hub on this machine: test_pull.py PROGRAM TINY_MODELS [unittest arguments]"""

import json
import os
import random
import shutil
import signal
import ssl
import subprocess
import threading
import time
import unittest

import hub as hubs
from program import F16_MODEL, PROGRAM, Scratch, failure, main, run

FOLDER = "models--org--tiny"


def model_files(folder):
    files = {}
    for name in sorted(os.listdir(folder)):
        with open(os.path.join(folder, name), "rb") as file:
            files[name] = file.read()
    return files


TINY_FILES = model_files(F16_MODEL)
EXTRAS = {".gitattributes": b"*.safetensors filter=lfs\n", "README.md": b"# tiny\n", "onnx/model.onnx": b"onnx",
          "pytorch_model.bin": b"pickle", "consolidated.safetensors": b"the same again"}
WEIGHTS = "model.safetensors"


class Pull(Scratch):
    def setUp(self):
        super().setUp()
        self.hub = None
        self.serve({**TINY_FILES, **EXTRAS})

    def tearDown(self):
        self.hub.close()
        super().tearDown()

    def serve(self, files, repository="org/tiny", **keywords):
        if self.hub:
            self.hub.close()
        self.hub = hubs.Hub(repository, files, **keywords)
        kept = {name: value for name, value in os.environ.items()
                if not name.startswith("HF_") and not name.lower().endswith("_proxy")}
        self.env = {**kept, "HF_HOME": self.path("hf"), "HF_ENDPOINT": self.hub.endpoint}
        self.cache = self.path("hf/hub/" + "models--" + repository.replace("/", "--"))

    def pull(self, *arguments, **keywords):
        return run("pull", "org/tiny", *arguments, env=self.env, **keywords)

    def fails(self, *arguments, code=1, model="org/tiny"):
        return failure("pull", model, *arguments, code=code, env=self.env)

    def requests_of(self, path):
        return [request for request in self.hub.requests if request[2].split("?")[0].endswith(path)]

    def blob(self, path):
        return os.path.join(self.cache, "blobs", self.hub.etag(path))

    def check_layout(self, files=TINY_FILES, revision="main"):
        snapshot = os.path.join(self.cache, "snapshots", hubs.COMMIT)
        with open(os.path.join(self.cache, "refs", revision)) as file:
            self.assertEqual(file.read(), hubs.COMMIT)
        found = {os.path.relpath(os.path.join(folder, name), snapshot)
                 for folder, _, names in os.walk(snapshot) for name in names}
        self.assertEqual(found, set(files))
        for name, data in files.items():
            place = os.path.join(snapshot, name)
            self.assertEqual(os.readlink(place), "../" * (2 + name.count("/")) + "blobs/" + self.hub.etag(name))
            with open(place, "rb") as file:
                self.assertEqual(file.read(), data)
        self.assertEqual(set(os.listdir(os.path.join(self.cache, "blobs"))), {self.hub.etag(name) for name in files})
        return snapshot

    def test_a_model_is_there_afterwards(self):
        out, err = self.pull()
        snapshot = self.check_layout()
        self.assertEqual(out.strip(), snapshot)
        self.assertIn("Next: nestedfp chat org/tiny", err)
        by_name, _ = run("generate", "org/tiny", "-p", "the quick", "-n", "4", "--ignore-eos", "-q", env=self.env)
        by_path, _ = run("generate", F16_MODEL, "-p", "the quick", "-n", "4", "--ignore-eos", "-q")
        self.assertEqual(by_name, by_path)
        for unneeded in EXTRAS:
            self.assertEqual(self.requests_of(unneeded), [])
        # A second pull asks for the list, and for nothing that is there. It writes nothing: the cache may be read-only.
        self.hub.requests.clear()
        written = lambda: {folder: os.stat(folder).st_mtime_ns for folder, _, _ in os.walk(self.path("hf"))}
        before = written()
        _, err = self.pull()
        self.assertEqual(written(), before)
        self.assertEqual(len(self.hub.requests), 1)
        self.assertIn("(0.0 KiB of them fetched now)", err)

    @unittest.skipUnless(__import__("importlib.util").util.find_spec("huggingface_hub"), "huggingface_hub is not installed")
    def test_hugging_faces_own_client_finds_it(self):
        from huggingface_hub import scan_cache_dir, try_to_load_from_cache
        self.pull()
        cache = self.path("hf/hub")
        for name, data in TINY_FILES.items():
            with open(try_to_load_from_cache("org/tiny", name, cache_dir=cache), "rb") as file:
                self.assertEqual(file.read(), data)
        report = scan_cache_dir(cache)
        self.assertEqual(report.warnings, [])
        (repository,) = report.repos
        self.assertEqual((repository.repo_id, repository.size_on_disk), ("org/tiny", sum(map(len, TINY_FILES.values()))))

    def test_revisions(self):
        for revision in ["v1", "refs/pr/1"]:
            self.pull("--revision", revision)
            self.check_layout(revision=revision)
        self.assertIn("not in the Hugging Face cache", failure("inspect", "org/tiny", env=self.env))
        run("inspect", "org/tiny@v1", env=self.env)
        self.assertIn("has no branch, tag or commit 'none'", self.fails("--revision", "none"))
        run("pull", "org/tiny@" + hubs.COMMIT, env=self.env)
        self.assertFalse(os.path.exists(os.path.join(self.cache, "refs", hubs.COMMIT)))
        shutil.rmtree(self.cache)
        run("pull", "org/tiny@" + hubs.COMMIT, env=self.env)
        self.assertEqual(run("models", "--names", env=self.env)[0], f"org/tiny@{hubs.COMMIT}\n")
        run("inspect", "org/tiny@" + hubs.COMMIT, env=self.env)
        self.assertIn("--revision ../x", self.fails("--revision", "../x", code=2))
        line = self.fails("--revision", "v2", model="org/tiny@v1", code=2)
        self.assertIn("pull org/tiny@v1: --revision v2 is another one", line)
        run("pull", "org/tiny@v1", "--revision", "v1", env=self.env)
        line = self.fails("--file", "b.gguf", model="org/tiny:a.gguf", code=2)
        self.assertIn("pull org/tiny:a.gguf: --file b.gguf is another one", line)

    def test_the_token_goes_to_the_hub_alone(self):
        self.hub.token = "hf_secret"
        self.env["HF_TOKEN"] = "hf_secret"
        self.pull()
        self.check_layout()
        for kind, _, path, headers in self.hub.requests:
            self.assertEqual(headers.get("Authorization"), "Bearer hf_secret" if kind == "hub" else None, path)
        self.assertTrue([1 for request in self.hub.requests if request[0] == "store"])

    def test_tokens_from_files(self):
        self.hub.token = "hf_file"
        self.assertIn("there is no such model at", self.fails())
        os.makedirs(self.path("hf"), exist_ok=True)
        with open(self.path("hf/token"), "w") as file:
            file.write("hf_file\n")
        self.pull()
        with open(self.path("other"), "w") as file:
            file.write("hf_other")
        self.env["HF_TOKEN_PATH"] = self.path("other")
        line = self.fails()
        self.assertIn("your token", line)
        self.assertNotIn("hf_other", line)
        self.env["HF_TOKEN"] = "two words"
        self.assertIn("characters that no token has", self.fails(code=2))

    def test_gated_models(self):
        self.hub.gated, self.hub.token = True, "hf_secret"
        line = self.fails(code=2)
        self.assertIn("is gated (401): accept its terms at " + self.hub.endpoint + "/org/tiny, and set HF_TOKEN", line)
        self.env["HF_TOKEN"] = "hf_wrong"
        self.assertIn("is gated (403)", self.fails(code=2))
        self.env["HF_TOKEN"] = "hf_secret"
        self.pull()
        self.check_layout()

    def test_models_that_are_not_there(self):
        line = self.fails(model="org/none")
        self.assertIn("org/none: there is no such model at " + self.hub.endpoint, line)
        self.assertIn("or it is private (401)", line)
        self.env["HF_TOKEN"] = "hf_any"
        self.assertIn("no such model", self.fails(model="org/none"))
        for name in ["none", "../x", "a/b/c", "org/", "https://huggingface.co/org/name"]:
            self.assertIn("is called org/name", self.fails(model=name, code=2))

    def test_a_connection_that_ends_early_is_resumed(self):
        half = len(TINY_FILES[WEIGHTS]) // 2
        self.hub.cut = {WEIGHTS: half, "tokenizer.json": 100}
        self.pull()
        self.check_layout()
        first, second = [request for request in self.requests_of(WEIGHTS) if request[0] == "store"]
        self.assertNotIn("Range", first[3])
        self.assertEqual(second[3]["Range"], f"bytes={half}-")

    def test_what_an_earlier_run_left_is_used(self):
        half = len(TINY_FILES[WEIGHTS]) // 2
        os.makedirs(os.path.join(self.cache, "blobs"))
        with open(self.blob(WEIGHTS) + ".incomplete", "wb") as file:
            file.write(TINY_FILES[WEIGHTS][:half])
        self.pull()
        self.check_layout()
        (request,) = [request for request in self.requests_of(WEIGHTS) if request[0] == "store"]
        self.assertEqual(request[3]["Range"], f"bytes={half}-")

    def test_a_server_without_ranges(self):
        self.hub.ranges = False
        self.hub.cut = {WEIGHTS: 1000}
        self.pull()
        self.check_layout()

    def test_damage_in_what_was_there_is_mended(self):
        os.makedirs(os.path.join(self.cache, "blobs"))
        with open(self.blob(WEIGHTS) + ".incomplete", "wb") as file:
            file.write(b"x" + TINY_FILES[WEIGHTS][1:500])
        self.pull()
        self.check_layout()

    def test_wrong_checksums(self):
        for path, kind in [("config.json", "Git SHA-1"), (WEIGHTS, "SHA-256")]:
            data = TINY_FILES[path]
            self.hub.wrong = {path: data[:-1] + bytes([data[-1] ^ 1])}
            line = self.fails()
            self.assertIn(f"org/tiny: {path}: arrived with {kind}", line)
            self.assertIn(self.hub.etag(path), line)
            self.assertFalse(os.path.exists(self.blob(path)))
            self.assertFalse(os.path.exists(os.path.join(self.cache, "refs")))
        self.hub.wrong = {}
        self.pull()
        self.check_layout()

    def test_busy_servers_are_waited_for(self):
        self.hub.list_passing = [503]
        self.hub.passing = [503, 429, 500]
        self.pull("--jobs", "1")
        self.check_layout()

    def test_what_a_store_refuses_is_not_the_hubs_word(self):
        self.hub.store_status = 403
        line = self.fails()
        self.assertIn(f"{WEIGHTS} is answered with status 403 by {self.hub.store_url}/{WEIGHTS}", line)
        self.assertNotIn("signature", line)
        self.assertNotIn("gated", line)

    def test_paths_that_lead_out_are_refused(self):
        for path in ["../evil", "a/../../evil", "/tmp/evil", "a\\b", "a\0b", "", "."]:
            entry = {"rfilename": path, "size": 1, "blobId": "0" * 40}
            self.hub.listed = {"sha": hubs.COMMIT, "siblings": [*self.hub.siblings(), entry]}
            self.assertIn("which is no path inside a model; refused", self.fails())
            self.assertEqual(self.requests_of("model.safetensors"), [])
        self.hub.listed = {"sha": "../../evil", "siblings": []}
        self.assertIn("'sha'", self.fails())
        self.assertFalse(os.path.exists(self.path("hf")))

    def test_redirects_that_are_refused(self):
        self.hub.store_redirect = "file:///etc/passwd"
        self.assertIn("redirects to what is no URL", self.fails())
        self.hub.store_redirect = self.hub.endpoint + f"/org/tiny/resolve/{hubs.COMMIT}/{WEIGHTS}"
        self.assertIn("more than 10 redirects", self.fails())

    def test_nothing_answers(self):
        self.env["HF_ENDPOINT"] = "http://127.0.0.1:9"
        self.assertRegex(self.fails(), "is there a network, and is http://127.0.0.1:9 the hub that you mean")
        self.env["HF_ENDPOINT"] = "ftp://host"
        self.assertIn("HF_ENDPOINT is 'ftp://host'", self.fails(code=2))
        self.env["HF_HUB_OFFLINE"] = "1"
        self.assertIn("HF_HUB_OFFLINE is set", self.fails(code=2))

    def test_what_is_no_hub(self):
        self.hub.listed = ["not", "a", "hub"]
        self.assertIn("is HF_ENDPOINT a hub?", self.fails())

    def test_models_that_cannot_run_are_not_fetched(self):
        config = json.loads(TINY_FILES["config.json"])
        config.update(architectures=["GPT2LMHeadModel\x1b[2J"], model_type="gpt2")
        self.serve({**TINY_FILES, "config.json": json.dumps(config).encode()})
        line = self.fails()
        self.assertIn(r"'GPT2LMHeadModel\x1b[2J'", line)  # which a terminal would obey
        self.assertIn("its weights were not downloaded (--any", line)
        self.assertEqual(self.requests_of(WEIGHTS), [])
        self.pull("--any")
        self.assertTrue(self.requests_of(WEIGHTS))
        shutil.rmtree(self.cache)
        self.serve({name: data for name, data in TINY_FILES.items() if name != "tokenizer.json"})
        self.assertIn("has no tokenizer.json", self.fails())
        shutil.rmtree(self.cache)
        self.serve({"config.json": TINY_FILES["config.json"], "pytorch_model.bin": b"x"})
        self.assertIn("pickled", self.fails())

    def test_gguf_files(self):
        data = random.Random(1).randbytes(200000)
        self.serve({"README.md": b"x", "tiny.Q4_1.gguf": data, "tiny.Q8_0.gguf": b"other", "config.json": b"{}"})
        line = self.fails(code=2)
        self.assertIn("choose one with --file: tiny.Q4_1.gguf (195.3 KiB), tiny.Q8_0.gguf", line)
        out, err = self.pull("--file", "tiny.Q4_1.gguf")
        snapshot = self.check_layout({"tiny.Q4_1.gguf": data})
        self.assertEqual(out.strip(), os.path.join(snapshot, "tiny.Q4_1.gguf"))
        self.assertIn("nestedfp chat org/tiny:tiny.Q4_1.gguf", err)
        self.assertRegex(failure("inspect", "org/tiny:tiny.Q4_1.gguf", env=self.env), r"tiny\.Q4_1\.gguf: .*GGUF")
        self.assertIn("has no file none.gguf", self.fails("--file", "none.gguf", code=2))

    def test_gguf_parts(self):
        parts = {f"sub/tiny-0000{i}-of-00003.gguf": random.Random(i).randbytes(1000) for i in (1, 2, 3)}
        self.serve({"README.md": b"x", "tiny-00001-of-00003.gguf": b"other", **parts})
        out, err = self.pull("--file", "sub/tiny-00002-of-00003.gguf")
        snapshot = self.check_layout(parts)
        self.assertEqual(out.strip(), os.path.join(snapshot, "sub/tiny-00001-of-00003.gguf"))
        self.assertIn("nestedfp chat org/tiny:sub/tiny-00001-of-00003.gguf", err)
        self.assertIn("has no tiny-00002-of-00003.gguf, one of the 3 parts", self.fails("--file", "tiny-00001-of-00003.gguf"))
        shutil.rmtree(self.cache)
        self.serve(parts)
        self.assertIn("nestedfp chat org/tiny:sub/tiny-00001-of-00003.gguf", self.pull()[1])

    def test_dry_run_lists_and_fetches_no_weights(self):
        out, _ = self.pull("--dry-run")
        self.assertEqual([line.split()[-1] for line in out.splitlines()[:-1]][-1], WEIGHTS)
        self.assertIn(hubs.COMMIT, out.splitlines()[-1])
        self.assertEqual(self.requests_of(WEIGHTS), [])
        self.assertFalse(os.path.exists(os.path.join(self.cache, "refs")))

    def test_a_full_disk(self):
        huge = {"sha": hubs.COMMIT, "siblings": [{**entry, "lfs": {**entry["lfs"], "size": 1 << 60}} if "lfs" in entry else entry
                                                 for entry in self.hub.siblings()]}
        self.hub.listed = huge
        self.assertRegex(self.fails(), r"needs 1073741824\.00 GiB more in .*, where [0-9.]+ [GM]iB are free")
        self.assertEqual(self.requests_of(WEIGHTS), [])

    def test_a_place_that_cannot_be_written(self):
        with open(self.path("hf"), "w") as file:
            file.write("in the way")
        self.assertIn("HF_HUB_CACHE or HF_HOME name another place", self.fails())

    def start(self, *arguments):
        return subprocess.Popen([PROGRAM, "pull", "org/tiny", *arguments], env=self.env, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True)

    def wait_for(self, condition):
        end = time.monotonic() + 60
        while not condition():
            self.assertLess(time.monotonic(), end)
            time.sleep(0.02)

    def test_ctrl_c_leaves_what_came(self):
        event = threading.Event()
        half = len(TINY_FILES[WEIGHTS]) // 2
        self.hub.stall = {WEIGHTS: (half, event)}
        process = self.start()
        incomplete = self.blob(WEIGHTS) + ".incomplete"
        self.wait_for(lambda: os.path.exists(incomplete) and os.path.getsize(incomplete) == half)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 130)
        self.assertIn("org/tiny: stopped; run it again to go on from here", err)
        self.assertEqual(os.path.getsize(incomplete), half)
        out, _ = run("models", env=self.env)
        self.assertIn("unfinished: org/tiny", out)
        event.set()
        self.hub.stall = {}
        self.hub.requests.clear()
        self.pull()
        self.check_layout()
        (request,) = [request for request in self.requests_of(WEIGHTS) if request[0] == "store"]
        self.assertEqual(request[3]["Range"], f"bytes={half}-")

    def test_two_at_once_download_once(self):
        event = threading.Event()
        self.hub.stall = {WEIGHTS: (10, event)}
        first = self.start()
        self.wait_for(lambda: self.requests_of(WEIGHTS))
        second = self.start()
        time.sleep(2)
        event.set()
        (_, first_said), (_, second_said) = [process.communicate(timeout=60) for process in (first, second)]
        self.assertEqual((first.returncode, second.returncode), (0, 0))
        self.assertNotIn("another process", first_said)
        self.assertIn(f"{WEIGHTS}: another process downloads it", second_said)
        self.assertEqual(len([1 for request in self.requests_of(WEIGHTS) if request[0] == "store"]), 1)
        self.check_layout()

    def test_downloads_at_a_time_are_bounded(self):
        shards = {f"model-{i:05}-of-00006.safetensors": b"%d" % i * 1000 for i in range(1, 7)}
        index = {"weight_map": {name: name for name in shards}}
        self.serve({**{name: data for name, data in TINY_FILES.items() if name != WEIGHTS}, **shards,
                    "model.safetensors.index.json": json.dumps(index).encode()})
        event = threading.Event()
        self.hub.stall = {name: (10, event) for name in shards}
        process = self.start("--jobs", "3")
        started = lambda: len([1 for request in self.hub.requests if request[0] == "store"])
        self.wait_for(lambda: started() == 3)
        time.sleep(0.5)
        self.assertEqual(started(), 3)
        event.set()
        process.communicate(timeout=60)
        self.assertEqual((process.returncode, started()), (0, 6))

    @unittest.skipUnless(shutil.which("openssl"), "there is no openssl to make a certificate with")
    def test_https(self):
        subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
                        "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", self.path("key"),
                        "-out", self.path("cert")], check=True, capture_output=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.path("cert"), self.path("key"))
        self.serve({**TINY_FILES, **EXTRAS}, context=context)
        self.assertIn("certificate", self.fails())  # nobody vouches for it
        self.env["SSL_CERT_FILE"] = self.path("cert")
        self.hub.store_redirect = "http://127.0.0.1:9/x"
        self.assertIn("redirects from https to http", self.fails())
        self.hub.store_redirect = None
        self.pull()
        self.check_layout()


class Models(Pull):
    def test_a_cache_that_cannot_be_read_is_not_an_empty_one(self):
        cache = self.path("file")
        with open(cache, "w", encoding="utf-8"):
            pass
        for flags in ([], ["--json"], ["--names"]):
            self.assertIn(f"{cache}: cannot be read: Not a directory", failure("models", *flags, env={**self.env, "HF_HUB_CACHE": cache}))

    def test_what_is_there_and_whether_it_loads(self):
        out, _ = run("models", env=self.env)
        self.assertIn("no model in", out)
        self.pull()
        config = json.loads(TINY_FILES["config.json"])
        config.update(architectures=["GPT2LMHeadModel"], model_type="gpt2")
        self.serve({**TINY_FILES, "config.json": json.dumps(config).encode()}, repository="org/other")
        run("pull", "org/other", "--any", env=self.env)
        listed = json.loads(run("models", "--json", env=self.env)[0])
        by_name = {model["name"]: model for model in listed["models"]}
        self.assertEqual(set(by_name), {"org/tiny", "org/other"})
        tiny = by_name["org/tiny"]
        self.assertEqual((tiny["loads"], tiny["reason"], tiny["weights"]), (True, "", "safetensors F16"))
        self.assertEqual(tiny["bytes"], sum(map(len, TINY_FILES.values())))
        self.assertEqual(tiny["memory_bytes"], 2 * tiny["parameters"])
        self.assertFalse(by_name["org/other"]["loads"])
        self.assertIn("GPT2LMHeadModel", by_name["org/other"]["reason"])
        out, _ = run("models", env=self.env)
        self.assertRegex(out, r"org/tiny +[0-9.]+ [KM]iB +LlamaForCausalLM +safetensors F16 +[0-9.]+ [KM]iB +yes")
        self.assertRegex(out, r"org/other .* no: ")
        # A truncated file is told.
        with open(os.path.join(self.path("hf/hub"), FOLDER, "snapshots", hubs.COMMIT, WEIGHTS), "r+b") as file:
            file.truncate(100)
        out, _ = run("models", env=self.env)
        self.assertRegex(out, r"org/tiny .* no: .*model\.safetensors")


if __name__ == "__main__":
    # What Models inherits are helpers, not tests to run twice.
    for test in [name for name in dir(Pull) if name.startswith("test_")]:
        setattr(Models, test, None)
    main()
