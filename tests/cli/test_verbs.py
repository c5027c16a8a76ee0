#!/usr/bin/env python3
"""Every verb of the program, as a person would run it: test_verbs.py PROGRAM TINY_MODELS [unittest arguments]

On tiny random models always, and on the demo model where NFP_DEMO_MODEL names it.
"""

import csv
import fcntl
import json
import os
import pathlib
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
import unittest

from program import ALL_MODELS, F16_MODEL, FP8_MODELS, MODELS, PROGRAM, Scratch, failure, main, run

DEMO = os.environ.get("NFP_DEMO_MODEL", "")
PLOT = pathlib.Path(__file__).resolve().parents[2] / "bench" / "plot_breakdown.py"


class Tune(Scratch):
    def test_print_shows_every_choice(self):
        out, _ = run("tune", "--print", "--shape", "4096,14336", "--modes", "f16,e4m3", "--tokens", "16,4096")
        lines = out.splitlines()
        self.assertEqual(len(lines), 4)
        self.assertRegex(lines[0], r"^m 16, n 4096, k 14336, f16: \d+x\d+ .*\(tuned\)")
        other, _ = run("tune", "--print", "--shape", "4096,14336", "--device", "H100")
        for line in other.splitlines():
            tokens = int(line.split(",")[0].split()[1])
            self.assertIn("(tuned)" if tokens <= 64 else "(predicted)", line)
        _, err = run("tune", "--shape", "4096,14336", "--check", "1", code=2)
        self.assertIn("--check '1' is not SEED,COUNT", err)
        _, err = run("tune", "--print", "--shape", "4096,14336", "--device", "H300", code=2)
        self.assertIn("H300", err)
        out, _ = run("tune", F16_MODEL, "--print", "--tokens", "1", "--modes", "f16")
        with open(os.path.join(F16_MODEL, "config.json")) as file:
            config = json.load(file)
        self.assertIn(f"n {2 * config['intermediate_size']}, k {config['hidden_size']}, f16", out)
        self.assertIn("(predicted)", out)
        bare = self.path("config.json")  # weights are not read
        shutil.copy(os.path.join(F16_MODEL, "config.json"), bare)
        self.assertEqual(run("tune", bare, "--print", "--tokens", "1", "--modes", "f16")[0], out)

    def test_print_reads_a_table(self):
        table = self.path("choices.json")
        entry = {"n": 64, "k": 64, "mode": "f16", "by_tokens": {"1": "128x8 c1 b1 split4"}}
        with open(table, "w") as file:
            json.dump({"format": "nestedfp gemm choices 1", "device": "test", "choices": [entry]}, file)
        out, _ = run("tune", "--print", "--shape", "64,64", "--modes", "f16", "--tokens", "1", "--table", table)
        self.assertIn("128x8 c1 b1 split4 (tuned)", out)
        with open(table, "w") as file:
            file.write("{}")
        self.assertIn("choices.json: 'format' is neither", failure("tune", "--print", "--shape", "64,64", "--table", table))

    def test_refusals(self):
        self.assertIn("name a MODEL, or shapes with --shape", failure("tune", code=2))
        self.assertIn("--shape '64'", failure("tune", "--shape", "64", code=2))
        self.assertIn("--tokens: '3' is none of", failure("tune", "--shape", "64,64", "--tokens", "3", code=2))
        self.assertIn("--modes: 'fp8' is none of", failure("tune", "--shape", "64,64", "--modes", "fp8", code=2))
        bf16 = ("tune", F16_MODEL, "--modes", "bf16", "--out", self.path("none.json"))
        self.assertIn("--modes: no step of a model runs bf16", failure(*bf16, code=2))  # with a GPU or without
        self.assertIn("tokens of context that", failure("tune", F16_MODEL, "--tokens", "4096", "--out", self.path("none.json"), code=2))
        self.assertFalse(os.path.exists(self.path("none.json")))
        there = self.path("there.json")
        with open(there, "w") as file:
            file.write("kept")
        self.assertIn("exists; choose another --out", failure("tune", "--shape", "64,64", "--out", there, code=2))
        with open(there) as file:
            self.assertEqual(file.read(), "kept")
        os.symlink("loop", self.path("loop"))
        for odd in (self.path("loop"), self.path("x" * 5000)):
            failure("tune", "--shape", "64,64", "--modes", "f16", "--tokens", "1", "--check", "1,0", "--out", odd)

    @unittest.skipIf(shutil.which("nvidia-smi"), "there may be a GPU")
    def test_without_a_gpu(self):
        for what, said in [(["--shape", "64,64"], "no usable CUDA device"), ([F16_MODEL], "times kernels on a GPU")]:
            self.assertRegex(failure("tune", *what, "--out", self.path("new.json")), "was built without CUDA|" + said)
            self.assertFalse(os.path.exists(self.path("new.json")))


class Generate(Scratch):
    def answer(self, model, *arguments):
        out, _ = run("generate", model, "-p", "the quick brown", "-n", "12", "--ignore-eos", "--json", *arguments)
        return json.loads(out)

    def test_every_model_in_every_precision(self):
        for model in MODELS:
            for precision in ["fp16", "fp8", "fp8-w8a8"]:
                answer = self.answer(model, "--precision", precision)
                self.assertEqual(len(answer["tokens"]), 12, model)
                self.assertEqual({token["precision"] for token in answer["tokens"]}, {precision})
                self.assertEqual(answer["finish_reason"], "length")

    def test_nested_equals_plain_fp16(self):
        for model in MODELS:
            nested = self.answer(model)
            plain = self.answer(model, "--baseline", "f16")
            if "llama-headdim" not in model:  # BF16 values that FP16 cannot hold: there nested is closer to the source
                self.assertEqual(nested["text"], plain["text"], model)

    def test_the_smallest_repetition_penalty(self):
        least, small = (self.answer(F16_MODEL, "--repetition-penalty", penalty) for penalty in ("1e-44", "1e-20"))
        self.assertEqual(least["tokens"], small["tokens"])

    def test_switching_marks_and_counts(self):
        answer = self.answer(F16_MODEL, "--switch-every", "3")
        kinds = [token["precision"] for token in answer["tokens"]]
        self.assertEqual(kinds, ["fp16"] * 3 + ["fp8"] * 3 + ["fp16"] * 3 + ["fp8"] * 3)
        out, _ = run("generate", F16_MODEL, "-p", "a b", "-n", "6", "--ignore-eos", "--switch-every", "2")
        self.assertEqual([out.count("[fp16]"), out.count("[fp8]")], [2, 1])
        for none, colours in (("", 2), ("1", 0)):  # where FP8 begins, on a terminal
            ours, theirs = pty.openpty()
            process = subprocess.Popen([PROGRAM, "generate", F16_MODEL, "-p", "a b", "-n", "8", "--ignore-eos", "--switch-every", "2"],
                                       stdout=theirs, stderr=subprocess.DEVNULL, env={**os.environ, "NO_COLOR": none})
            self.assertEqual(process.wait(60), 0)
            os.close(theirs)
            said = os.read(ours, 65536)
            os.close(ours)
            self.assertEqual((said.count(b"[fp8]"), said.count(b"\033[33m")), (2, colours))

    def test_ctrl_c_ends_it_with_what_there_is(self):
        # A pipe of one page that is nearly full holds the program where it is until the signal has been sent.
        taken = 3900
        reader, writer = os.pipe()
        fcntl.fcntl(writer, 1031, 4096)  # F_SETPIPE_SZ, which Python names since 3.10
        os.write(writer, b" " * taken)
        process = subprocess.Popen([PROGRAM, "generate", F16_MODEL, "-p", "the quick brown", "--ignore-eos", "--ctx", "256"],
                                   stdout=writer, stderr=subprocess.PIPE, text=True)
        os.close(writer)

        def waiting():
            return struct.unpack("i", fcntl.ioctl(reader, termios.FIONREAD, b"\0" * 4))[0]
        end = time.monotonic() + 120
        while waiting() <= taken:
            self.assertIsNone(process.poll())
            self.assertLess(time.monotonic(), end)
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        with open(reader, encoding="utf-8", errors="replace") as file:
            out = file.read()[taken:]
        _, err = process.communicate(timeout=120)
        self.assertEqual(process.returncode, 130)
        self.assertTrue(out.startswith("the quick brown"), out)
        self.assertTrue(out.endswith("\n"), out)
        self.assertRegex(err, r"fp16: \d+ prompt tokens, \d+ generated")
        self.assertNotIn("error:", err)

    def test_progress_is_as_wide_as_the_terminal(self):
        def drawn(columns, **more):
            ours, theirs = pty.openpty()
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
            out = subprocess.run([PROGRAM, "generate", F16_MODEL, "-p", "a", "-n", "1", "-q"], stdout=subprocess.DEVNULL, stderr=theirs,
                                 env={**os.environ, "TERM": "xterm", **more}, timeout=60, check=True)
            self.assertEqual(out.returncode, 0)
            os.close(theirs)
            text = b""
            while True:
                try:
                    piece = os.read(ours, 1 << 16)
                except OSError:  # all was read
                    break
                if not piece:
                    break
                text += piece
            os.close(ours)
            return [line for line in text.decode().split("\r\033[K") if line]

        whole = drawn(80)
        self.assertRegex(whole[-1], r"^loading \[#+\.*\] \d+%$")
        self.assertEqual(drawn(0)[-1], whole[-1])  # nobody knows how wide it is
        for columns in (20, 2):
            self.assertEqual({line for line in drawn(columns)} - {line[:columns - 1] for line in whole}, set())
        self.assertEqual(drawn(80, TERM="dumb"), [])

    def test_sampling_is_repeatable_by_seed_and_thread_count(self):
        flags = ["--temperature", "1", "--top-k", "40", "--top-p", "0.9", "--repetition-penalty", "1.2"]
        first = self.answer(F16_MODEL, *flags, "--seed", "5")
        self.assertEqual(first["text"], self.answer(F16_MODEL, *flags, "--seed", "5", "--threads", "1")["text"])
        texts = {self.answer(F16_MODEL, *flags, "--seed", str(seed))["text"] for seed in range(6)}
        self.assertGreater(len(texts), 1)

    def test_sampling_as_the_model_recommends(self):
        model = self.path("model")
        shutil.copytree(F16_MODEL, model)
        with open(os.path.join(model, "generation_config.json"), "w") as file:
            json.dump({"temperature": 5.0, "top_k": 50}, file)
        out, _ = run("inspect", model)
        self.assertIn("temperature 5, top_k 50", out)
        self.assertEqual(json.loads(run("inspect", model, "--json")[0])["sampling"], {"temperature": 5.0, "top_k": 50})
        greedy = self.answer(F16_MODEL)["text"]

        def texts(*flags):
            common = ["generate", model, "-p", "the quick brown", "-n", "12", "--ignore-eos", "-q", "--seed"]
            return {run(*common, str(seed), *flags)[0] for seed in range(4)}
        self.assertGreater(len(texts()), 1)
        for flags in (["--generation-config", "none"], ["--temperature", "0"], ["--generation-config", self.path("own")]):
            os.makedirs(self.path("own"), exist_ok=True)
            with open(self.path("own/generation_config.json"), "w") as file:
                json.dump({"temperature": 0}, file)
            (only,) = texts(*flags)
            self.assertEqual(only.rstrip("\n"), greedy, flags)
        with open(os.path.join(model, "generation_config.json"), "w") as file:
            json.dump({"max_new_tokens": 12}, file)
        common = ["generate", model, "-p", "the quick brown", "--ignore-eos", "-q"]
        self.assertEqual(run(*common)[0].rstrip("\n"), greedy)
        self.assertGreater(len(run(*common, "-n", "0")[0]), len(greedy))
        for text in ('{"top_p": 7}', "[]"):
            with open(os.path.join(model, "generation_config.json"), "w") as file:
                file.write(text)
            self.assertIn("generation_config.json", failure("generate", model, "-p", "x"))
        self.assertIn("--generation-config", failure("generate", F16_MODEL, "-p", "x", "--generation-config", "/nowhere", code=2))

    def test_kernel_sets_agree(self):
        cpu = pathlib.Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
        sets = ["scalar"] + (["avx2"] if " avx2" in cpu else []) + (["avx512"] if " avx512bw" in cpu else [])
        texts = set()
        for name in sets:
            out, _ = run("generate", F16_MODEL, "-p", "x y z", "-n", "20", "--ignore-eos", "-q",
                         env={**os.environ, "NESTEDFP_CPU": name})
            texts.add(out)
        self.assertEqual(len(texts), 1)
        failure("generate", F16_MODEL, "-p", "x", code=2, env={**os.environ, "NESTEDFP_CPU": "z80"})

    def test_flags_of_fp8_where_there_is_none_are_told(self):
        def idle(*words):
            return re.findall(r"warning (--[a-z0-9-]+): does nothing, as ", run(*words)[1])

        flags = ("--fp8-share", "0.5", "--fp8-head")
        generate = ("generate", F16_MODEL, "-p", "ab", "-n", "2", *flags)
        self.assertEqual(idle(*generate), ["--fp8-share", "--fp8-head"])
        for more in (["--precision", "fp8"], ["--switch-every", "1"], ["--speculative-tokens", "2"]):
            self.assertEqual(idle(*generate, *more), [], more)
        bench = ("bench", F16_MODEL, "--batch", "1", "--prompt", "4", "--context", "4", "--generate", "2", "--repeats", "1", *flags)
        self.assertEqual(idle(*bench, "--precisions", "fp16"), ["--fp8-share", "--fp8-head"])
        self.assertEqual(idle(*bench), [])
        latency = ("bench", F16_MODEL, "latency", "--batch", "1", "--input", "4", "--output", "2", "--repeats", "1", *flags)
        self.assertEqual(idle(*latency, "--precisions", "fp16"), ["--fp8-share", "--fp8-head"])
        self.assertEqual(idle(*latency[:-3], "--precisions", "fp16", "--switching"), ["--switching"])
        self.assertEqual(idle(*latency, "--precisions", "fp8", "--speculative-tokens", "2"), ["--speculative-tokens"])
        self.assertEqual(idle(*latency, "--speculative-tokens", "2", "--speculative-always"), [])
        self.assertEqual(idle("generate", F16_MODEL, "-p", "ab", "-n", "2", "--speculative-always"), ["--speculative-always"])

    def test_prompts_from_file_and_pipe(self):
        with open(self.path("prompt"), "w") as file:
            file.write("the quick brown")
        by_flag, _ = run("generate", F16_MODEL, "-p", "the quick brown", "-n", "5", "-q")
        self.assertEqual(run("generate", F16_MODEL, "-f", self.path("prompt"), "-n", "5", "-q")[0], by_flag)
        self.assertEqual(run("generate", F16_MODEL, "-n", "5", "-q", stdin="the quick brown")[0], by_flag)
        for flag, said, code in (("-p", "prompt is empty", 1), ("-f", "--file: the name is empty", 2)):
            # Given, and so no reason to read the pipe.
            self.assertIn(said, failure("generate", F16_MODEL, flag, "", "-n", "5", stdin="the quick brown", code=code))

    def test_text_that_is_not_utf8(self):
        """Else the model would read replacement characters."""
        with open(self.path("latin1"), "wb") as file:
            file.write(b"gr\xfc\xdfe")
        self.assertIn("--prompt is not UTF-8", failure("generate", "/nowhere", "-p", b"gr\xfc\xdfe", code=2))
        self.assertIn(": is not UTF-8; name a file of plain text", failure("generate", "/nowhere", "-f", self.path("latin1")))
        with open(self.path("latin1"), "rb") as piped:
            done = subprocess.run([PROGRAM, "generate", "/nowhere"], stdin=piped, capture_output=True, timeout=60)
        self.assertEqual((done.returncode, done.stderr), (1, b"nestedfp: error: standard input: is not UTF-8\n"))
        self.assertIn("--stop is not UTF-8", failure("generate", "/nowhere", "-p", "a", "--stop", b"\xff", code=2))

    def test_a_prompt_without_end(self):
        with open("/dev/zero", "rb") as zero:
            done = subprocess.run([PROGRAM, "generate", F16_MODEL], stdin=zero, capture_output=True, text=True, timeout=60)
        self.assertEqual(done.stderr, "nestedfp: error: standard input: larger than the 268435456 bytes allowed here\n")

    @unittest.skipIf(os.environ.get("NFP_SANITIZE"), "a sanitizer's own memory would count")
    def test_threads_and_memory_that_the_system_does_not_give_are_told(self):
        model = self.path("model")
        shutil.copytree(F16_MODEL, model)
        config = pathlib.Path(model, "config.json")
        config.write_text(config.read_text().replace('"max_position_embeddings": 512', '"max_position_embeddings": 1073741824'))
        for flags, said in ((["--threads", "1000"], "cannot start 1000 threads: .*--threads"),
                            (["--ctx", "1073741824"], "not enough memory; use a smaller model, context")):
            script = 'ulimit -s 8192; ulimit -v 3000000; exec "$0" "$@"'
            done = subprocess.run(["sh", "-c", script, PROGRAM, "generate", model, "-p", "x", "-n", "1", *flags],
                                  capture_output=True, text=True, timeout=60)
            self.assertEqual((done.returncode, done.stdout), (1, ""), flags)
            self.assertRegex(done.stderr, f"^nestedfp: error: .*{said}", flags)

    @unittest.skipIf(os.environ.get("NFP_SANITIZE"), "a sanitizer's own memory would count")
    def test_weights_that_memory_does_not_hold_are_told_before_they_are_read(self):
        """A kernel that ends the program for it says nothing."""
        model = self.path("model")
        shutil.copytree(F16_MODEL, model)
        path = pathlib.Path(model, "config.json")
        config = json.loads(path.read_text())
        config |= {"vocab_size": 1 << 24, "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8}  # 256 GiB
        path.write_text(json.dumps(config))
        done = subprocess.run(["sh", "-c", 'ulimit -v 3000000; exec "$0" "$@"', PROGRAM, "bench", model, "--load-format", "dummy",
                               "--device", "cpu", "--prompt", "4", "--generate", "2"], capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 1, done.stderr)
        told, refused = done.stderr.splitlines()
        self.assertRegex(told, r"warning .*model: its weights take 256\.\d\d GiB, and \d+\.\d\d GiB of memory are free here")
        self.assertIn("cannot allocate", refused)
        self.assertNotIn("its weights take", run("generate", F16_MODEL, "-p", "x", "-n", "1", "--device", "cpu")[1])

    @unittest.skipIf(os.environ.get("NFP_SANITIZE"), "a sanitizer's own memory would count")
    def test_a_kv_cache_that_memory_does_not_hold_is_told(self):
        done = subprocess.run(["sh", "-c", 'ulimit -v 3000000; exec "$0" "$@"', PROGRAM, "serve", F16_MODEL, "--port", "0", "--device",
                               "cpu", "--precision", "fp16", "--kv-cache-memory", "200GB", "--block-size", "256"],
                              capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertRegex(done.stderr, r"warning the KV cache, when it is full, takes 200\.00 GiB, and \d+\.\d\d GiB of memory are free")
        self.assertIn("cannot allocate", done.stderr)

    def test_standard_error_that_takes_nothing_is_no_failure(self):
        plain = run("generate", F16_MODEL, "-p", "the quick brown", "-n", "5")[0]
        for redirect in ["2>&-"] + ["2>/dev/full"] * os.path.exists("/dev/full"):
            done = subprocess.run(["sh", "-c", f'"$0" generate "$1" -p "the quick brown" -n 5 {redirect}', PROGRAM, F16_MODEL],
                                  stdout=subprocess.PIPE, text=True, timeout=60)
            self.assertEqual((done.returncode, done.stdout), (0, plain), redirect)

    def test_an_answer_that_cannot_be_written_is_told(self):
        for redirect in [">&-"] + [">/dev/full"] * os.path.exists("/dev/full"):
            for words in (["generate", F16_MODEL, "-p", "x", "-n", "2"], ["generate", "--help"], ["--version"],
                          ["completion", "bash"]):  # more than a buffer of what is printed
                done = subprocess.run(["sh", "-c", f'"$0" "$@" {redirect}', PROGRAM, *words], stderr=subprocess.PIPE,
                                      text=True, timeout=60)
                self.assertEqual(done.returncode, 1, (redirect, words))
                self.assertIn("nestedfp: error: standard output", done.stderr)

    def test_stop_strings_and_kv_dtype(self):
        answer = self.answer(F16_MODEL, "--dtype-kv", "f32")
        stop = answer["text"][3:6]
        out, _ = run("generate", F16_MODEL, "-p", "the quick brown", "-n", "12", "--ignore-eos", "-q", "--dtype-kv", "f32",
                     "--stop", stop)
        self.assertEqual(out.rstrip("\n"), answer["text"][: answer["text"].index(stop)])

    def test_bad_input(self):
        self.assertIn("no such file", failure("generate", self.path("none"), "-p", "x"))
        self.assertIn("--temperature", failure("generate", F16_MODEL, "-p", "x", "--temperature", "-1", code=2))
        self.assertIn("context", failure("generate", F16_MODEL, "-p", "word " * 5000, "--ctx", "32", code=2))
        self.assertIn("prompt", failure("generate", F16_MODEL, stdin="").lower())
        run("generate", code=2)
        run("generate", F16_MODEL, "--precision", "fp4", code=2)
        run("generate", F16_MODEL, "-p", "x", "--no-such-flag", code=2)
        self.assertIn("nonsense: no such verb", failure("nonsense", F16_MODEL, "-p", "x", code=2))
        self.assertEqual(failure("generate", F16_MODEL, "--temprature", "3", "-p", "x", code=2), "nestedfp: error: --temprature "
                         "3: not expected here; `nestedfp generate --help` lists what is")
        self.assertIn("`nestedfp bench latency --help`", failure("bench", F16_MODEL, "latency", "--foo", code=2))
        run("generate", F16_MODEL, "-p", "x", "--baseline", "fp8-channel", code=2)

    def test_dummy_weights_without_a_tokenizer(self):
        bare = self.path("config.json")
        shutil.copy(os.path.join(F16_MODEL, "config.json"), bare)
        for words in (["generate", bare, "-p", "x"], ["chat", bare], ["perplexity", bare, "--file", __file__],
                      ["serve", bare, "--port", "0"]):
            self.assertIn("has no tokenizer.json", failure(*words, "--load-format", "dummy"), words[0])
        run("bench", bare, "--load-format", "dummy", "--prompt", "4", "--generate", "2", "--repeats", "1")

    def test_no_verb(self):
        self.assertIn("name a verb, such as `nestedfp chat MODEL`; `nestedfp --help` lists them", failure(code=2))

    def test_help_teaches(self):
        out, _ = run("--help")
        for verb in ["generate", "chat", "convert", "restore", "inspect", "perplexity", "bench"]:
            self.assertIn(verb, out)
            self.assertIn("xample", run(verb, "--help")[0], verb)


class ConvertAndRestore(Scratch):
    def weights(self, folder):
        return sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))

    def test_round_trip_is_bit_exact_and_runs(self):
        for model in MODELS:
            nested, back = self.path("nested-" + os.path.basename(model)), self.path("back-" + os.path.basename(model))
            run("convert", model, nested, "--calibrate", "none")
            config = json.loads(pathlib.Path(nested, "config.json").read_text())
            self.assertIn("nestedfp", config)
            self.assertEqual(config["quantization_config"]["quant_method"], "compressed-tensors")
            one = run("generate", model, "-p", "a b c", "-n", "8", "--ignore-eos", "-q")[0]
            two = run("generate", nested, "-p", "a b c", "-n", "8", "--ignore-eos", "-q")[0]
            self.assertEqual(one, two, model)
            one = run("generate", model, "-p", "a b c", "-n", "8", "--ignore-eos", "-q", "--precision", "fp8")[0]
            two = run("generate", nested, "-p", "a b c", "-n", "8", "--ignore-eos", "-q", "--precision", "fp8")[0]
            self.assertEqual(one, two, model)
            run("restore", nested, back)
            self.assertTrue(self.weights(back), model)

    def test_small_models_are_calibrated_without_being_asked(self):
        nested = self.path("nested")
        run("convert", F16_MODEL, nested)
        calibration = json.loads(pathlib.Path(nested, "config.json").read_text())["nestedfp"]["calibration"]
        self.assertEqual((calibration["text"], calibration["rule"]), ("self", "free"))
        self.assertIn(f"calibrated on {calibration['tokens']} tokens of the model's own text (rule free)", run("inspect", nested)[0])
        said = {name: value for name, value in calibration.items() if name not in ("order", "seed")}
        self.assertEqual(json.loads(run("inspect", nested, "--json")[0])["calibration"], said)
        self.assertIsNone(json.loads(run("inspect", F16_MODEL, "--json")[0])["calibration"])
        one = run("generate", F16_MODEL, "-p", "a b c", "-n", "8", "--ignore-eos", "-q")[0]
        self.assertEqual(one, run("generate", nested, "-p", "a b c", "-n", "8", "--ignore-eos", "-q")[0])
        run("generate", nested, "-p", "a b c", "-n", "2", "--precision", "fp8", "--fp8-share", "0.5")
        with open(self.path("latin1.txt"), "wb") as file:
            file.write(b"caf\xe9 " * 1000)
        self.assertIn("UTF-8", failure("convert", F16_MODEL, self.path("other"), "--calibrate", self.path("latin1.txt")))
        self.assertFalse(os.path.exists(self.path("other")))

    def test_what_cannot_be_written_is_refused_before_calibrating(self):
        nested = self.path("nested")
        run("convert", F16_MODEL, nested, "--calibrate", "none")
        kept = pathlib.Path(os.environ["XDG_CACHE_HOME"], "nestedfp", "calibration")
        before = sorted(kept.glob("*"))
        calibrate = ("--calibrate", "self", "--calibrate-seed", "77")
        self.assertIn("--force", failure("convert", F16_MODEL, nested, *calibrate))
        self.assertIn("nested checkpoint already", failure("convert", nested, self.path("again"), *calibrate))
        self.assertEqual(sorted(kept.glob("*")), before)
        self.assertEqual(os.listdir(self.dir), ["nested"])

    def test_what_a_killed_conversion_left_is_told_and_stays(self):
        with subprocess.Popen(["true"]) as process:
            pass
        left = self.path(f"nested.tmp-{process.pid}-0123456789abcdef")
        os.mkdir(left)
        with open(os.path.join(left, "model.safetensors"), "wb") as file:
            file.write(bytes(1_500_000))
        told = run("convert", F16_MODEL, self.path("nested"), "--calibrate", "none")[1]
        self.assertEqual(told.count(f"{left}: 1.5 MB"), 1, told)
        self.assertEqual(sorted(os.listdir(self.dir)), ["nested", os.path.basename(left)])

    def test_a_smoothed_checkpoint_is_the_same_model_in_fp16(self):
        nested = self.path("nested")
        calibrate = ("--calibrate", "self", "--calibrate-tokens", "512", "--calibrate-smooth")
        run("convert", F16_MODEL, nested, *calibrate)
        calibration = json.loads(pathlib.Path(nested, "config.json").read_text())["nestedfp"]["calibration"]
        self.assertIs(calibration["smoothed"], True)
        self.assertIn("text (rule free, smoothed)", run("inspect", nested)[0])
        for precision in ("fp16", "fp8"):
            generate = ("-p", "a b c", "-n", "8", "--ignore-eos", "-q", "--precision")
            one = run("generate", F16_MODEL, *generate, precision, *(() if precision == "fp16" else calibrate))[0]
            self.assertEqual(one, run("generate", nested, *generate, precision)[0])

    def test_how_to_calibrate_is_refused_where_nothing_is_calibrated(self):
        for how in (["--calibrate-smooth"], ["--calibrate-rule", "restricted"], ["--calibrate-compensate", "off"],
                    ["--calibrate-tokens", "64"], ["--calibrate-seed", "1"]):
            # For auto there is nothing to choose in what is FP8 already.
            for line in (failure("convert", F16_MODEL, self.path("other"), "--calibrate", "none", *how, code=2),
                         failure("convert", FP8_MODELS[0], self.path("other"), *how, code=2),
                         failure("generate", F16_MODEL, "-p", "a", *how, code=2)):
                self.assertIn(how[0], line)
                self.assertIn("--calibrate self", line)
        for verb in (("convert", F16_MODEL, self.path("other")), ("generate", F16_MODEL, "-p", "a", "--calibrate", "self")):
            line = failure(*verb, "--calibrate-tokens", "524289", code=2)
            self.assertIn("--calibrate-tokens: 524288 of the model's own", line)
        # A flag that says how asks for it, however long it would take: in a model of hours, too.
        deep = self.path("deep")
        shutil.copytree(F16_MODEL, deep)
        config = json.loads(pathlib.Path(deep, "config.json").read_text())
        pathlib.Path(deep, "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4096,
                                                                        "intermediate_size": 65536}))
        line = failure("convert", deep, self.path("other"), "--calibrate-rule", "restricted")
        self.assertIn("the checkpoint is incomplete", line)
        self.assertFalse(os.path.exists(self.path("other")))
        run("convert", F16_MODEL, self.path("restricted"), "--calibrate-rule", "restricted")
        config = json.loads(pathlib.Path(self.path("restricted"), "config.json").read_text())
        self.assertEqual(config["nestedfp"]["calibration"]["rule"], "restricted")

    def test_inputs_that_overflow_are_an_error_and_write_nothing(self):
        sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "models"))
        import numpy
        import safetensors_file

        broken = self.path("broken")
        shutil.copytree(F16_MODEL, broken)
        path = os.path.join(broken, [name for name in os.listdir(broken) if name.endswith(".safetensors")][0])
        tensors = safetensors_file.read(path)
        for name, (_, array) in list(tensors.items()):
            if name.endswith("layernorm.weight"):
                tensors[name] = ("F32", numpy.full(array.shape, 1e30, "<f4"))
        safetensors_file.write(path, tensors)
        line = failure("convert", broken, self.path("out"), "--calibrate", "self", "--calibrate-tokens", "256")
        # Already the first keys and values do not fit, of the text that the model would write.
        self.assertRegex(line, r"layer \d+: a (query, )?key or value is beyond FP16's range \(65504\)")
        self.assertFalse(os.path.exists(self.path("out")))
        # Not asked for, it is a warning, and the model is converted as it is.
        self.assertIn("not calibrated", run("convert", broken, self.path("out"))[1])

    def test_an_f16_checkpoint_comes_back_bit_for_bit(self):
        sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "models"))
        nested, back = self.path("nested"), self.path("back")
        run("convert", F16_MODEL, nested)
        run("restore", nested, back)
        self.assertEqual(tensors(F16_MODEL), tensors(back))

    def test_nothing_is_overwritten_or_left_behind(self):
        nested = self.path("nested")
        run("convert", F16_MODEL, nested)
        self.assertIn("--force", failure("convert", F16_MODEL, nested))
        self.assertIn("empty name", failure("convert", F16_MODEL, "", code=2))
        run("convert", F16_MODEL, nested, "--force")
        before = sorted(os.listdir(self.dir))
        broken = self.path("broken")
        shutil.copytree(F16_MODEL, broken)
        weights = [name for name in os.listdir(broken) if name.endswith(".safetensors")][0]
        with open(os.path.join(broken, weights), "r+b") as file:
            file.truncate(os.path.getsize(os.path.join(broken, weights)) - 10)
        failure("convert", broken, self.path("out"))
        shutil.rmtree(broken)
        done = subprocess.run(["sh", "-c", 'ulimit -f 50; "$0" convert "$1" "$2" --calibrate none', PROGRAM, F16_MODEL,
                               self.path("out")], capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 1)
        self.assertIn("File too large", done.stderr)
        self.assertEqual(sorted(os.listdir(self.dir)), before)


    def test_a_directory_of_a_containers_image_is_replaced(self):
        """An overlay renames no directory of its lower layer."""
        script = """
            mount -t tmpfs none "$3" && mkdir -p "$3/lower/old" "$3/upper" "$3/work" "$3/all" && echo {} > "$3/lower/old/config.json" &&
            mount -t overlay none -o "lowerdir=$3/lower,upperdir=$3/upper,workdir=$3/work,userxattr" "$3/all" || exit 77
            "$1" convert "$2" "$3/all/old" --calibrate none --force && "$1" inspect "$3/all/old" && ls "$3/all" """
        done = subprocess.run(["unshare", "-rm", "sh", "-c", script, "sh", PROGRAM, F16_MODEL, self.dir], capture_output=True,
                              text=True, timeout=60)
        if "unshare" in done.stderr or done.returncode == 77:
            self.skipTest(done.stderr)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.splitlines()[-1], "old")


def tensors(folder):
    """name -> (dtype, shape, bytes) of all safetensors of a directory."""
    found = {}
    for name in sorted(os.listdir(folder)):
        if not name.endswith(".safetensors"):
            continue
        data = pathlib.Path(folder, name).read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        for tensor, entry in header.items():
            if tensor != "__metadata__":
                begin, end = entry["data_offsets"]
                found[tensor] = (entry["dtype"], entry["shape"], data[8 + length + begin : 8 + length + end])
    return found


class Inspect(Scratch):
    def test_tables(self):
        for model in ALL_MODELS:
            out, _ = run("inspect", model)
            self.assertIn("gate", out)
            facts = json.loads(run("inspect", model, "--json")[0])
            self.assertEqual(facts["kv_bytes_per_token_fp8"], 2 * facts["layers"] * facts["kv_heads"] * facts["head_dim"])
            self.assertEqual(facts["kv_bytes_per_token_f16"], 2 * facts["kv_bytes_per_token_fp8"])
            self.assertEqual(facts["fp8_steps"], {"cpu": "fp8", "cuda": "fp8-w8a8"})
            self.assertIn("FP8 steps: fp8 on a CPU", out)
            self.assertIn("fp8-w8a8 on a GPU", run("inspect", os.path.join(model, "config.json"))[0])

    def test_what_fp16_changes_is_counted_by_the_sources_dtype(self):
        sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "models"))
        import numpy
        import safetensors_file

        mixed = self.path("mixed")
        shutil.copytree(F16_MODEL, mixed)
        path = os.path.join(mixed, [name for name in os.listdir(mixed) if name.endswith(".safetensors")][0])
        tensors = safetensors_file.read(path)
        matrix = [name for name in tensors if name.endswith("mlp.down_proj.weight")][0]
        tensors[matrix] = ("F32", tensors[matrix][1].astype("<f4") * numpy.float32(1 + 1e-4))
        safetensors_file.write(path, tensors)
        facts = json.loads(run("inspect", mixed, "--json")[0])
        changed = {m["name"]: m["inexact_weights"] for m in facts["matrices"] if m["inexact_weights"] > 0}
        self.assertEqual(list(changed), [matrix])
        self.assertEqual({m["dtype"] for m in facts["matrices"]}, {"f16", "f32"})
        self.assertEqual(facts["fp32"]["inexact_weights"], changed[matrix])
        self.assertGreater(facts["fp32"]["largest_error"], 0)
        self.assertEqual(facts["bf16"], {"source": False, "inexact_weights": 0, "largest_error": 0})
        out, _ = run("inspect", mixed)
        self.assertIn(f"FP32 source: {changed[matrix]} weights are not exact in FP16", out)
        self.assertNotIn("BF16 source", out)

    def test_a_configuration_alone_gives_what_its_weights_give(self):
        for model in ALL_MODELS:
            plan = json.loads(run("inspect", os.path.join(model, "config.json"), "--json")[0])
            facts = json.loads(run("inspect", model, "--json")[0])
            for field in ("parameters", "linear_parameters", "kv_bytes_per_token_f16", "kv_bytes_per_token_fp8", "layers", "head_dim", "fp8_steps"):
                self.assertEqual(plan[field], facts[field], f"{model}: {field}")
            shapes = {tensor["name"]: tensor["shape"] for tensor in plan["tensors"]}
            found = {}  # fused matrices are shown in parts
            for matrix in facts["matrices"]:
                rows, columns = matrix["shape"]
                whole = found.setdefault(matrix["part_of"] or matrix["name"], [0, columns])
                whole[0] += rows
            for name, shape in found.items():
                self.assertEqual(shapes[name], shape, f"{model}: {name}")
        out, _ = run("inspect", os.path.join(F16_MODEL, "config.json"))
        self.assertIn("GPUs of", out)


class Perplexity(Scratch):
    def setUp(self):
        super().setUp()
        with open(self.path("text"), "w") as file:
            file.write("the quick brown fox jumps over the lazy dog. " * 200)

    def measure(self, *arguments):
        out, _ = run("perplexity", F16_MODEL, "--file", self.path("text"), "--ctx", "64", "--chunks", "4", "--json", *arguments)
        return json.loads(out)

    def test_an_output_takes_the_place_of_no_input_and_no_other_output(self):
        text, link, report = self.path("text"), self.path("link"), self.path("report")
        os.symlink(text, link)
        with open(text) as file:
            before = file.read()
        for name in (text, link, os.path.join(self.dir, ".", "text")):
            said = failure("perplexity", F16_MODEL, "--file", text, "--save-base", name, code=2)
            self.assertIn(f"--save-base: {name} is what --file reads", said)
            self.assertIn("is what --file reads", failure("evaluate", F16_MODEL, "--file", text, "--html", name, code=2))
        with open(text) as file:
            self.assertEqual(file.read(), before)
        said = failure("evaluate", F16_MODEL, "--file", text, "--html", report, "--json-file", report, code=2)
        self.assertIn(f"--json-file: {report} is what --html writes, too", said)
        said = failure("perplexity", F16_MODEL, "--file", __file__, "--calibrate", text, "--save-base", text, code=2)
        self.assertIn("is what --calibrate reads", said)
        for words, flag in [(["bench", F16_MODEL, "throughput"], "--trace"), (["serve", F16_MODEL], "--step-times"),
                            (["serve", F16_MODEL], "--chat-template")]:
            said = failure(*words, flag, text, "--step-log", link, code=2, timeout=60)
            self.assertIn(f"--step-log: {link} is what {flag} reads", said)
        self.assertIn("is what MODEL reads", failure("serve", text, "--step-log", text, code=2, timeout=60))
        with open(text) as file:
            self.assertEqual(file.read(), before)
        words = ["tune", F16_MODEL, "--out", report]
        self.assertIn("is what --out writes, too", failure(*words, "--log-tried", report, code=2))
        config = shutil.copy(os.path.join(F16_MODEL, "config.json"), self.path("config.json"))
        self.assertIn("is what MODEL reads", failure("tune", config, "--out", report, "--log-tried", config, code=2))
        run("perplexity", F16_MODEL, "--file", text, "--ctx", "64", "--chunks", "1", "--save-base", "/dev/null")

    def test_chunking_changes_nothing(self):
        whole = self.measure()
        self.assertEqual(whole["scored_tokens"], 4 * 31)
        self.assertEqual(whole["perplexity"], self.measure("--chunk-tokens", "7")["perplexity"])
        self.assertEqual(whole["perplexity"], self.measure("--threads", "1")["perplexity"])
        self.assertEqual(whole["perplexity"], self.measure("--baseline", "f16")["perplexity"])

    def test_an_fp8_kv_cache_is_close_and_not_the_same(self):
        base = self.path("base")
        self.measure("--dtype-kv", "f32", "--save-base", base)
        of = {kv: self.measure("--dtype-kv", kv, "--kld-base", base)["kld"]["mean"] for kv in ["f16", "fp8"]}
        self.assertLess(of["f16"], 1e-5)
        # Seven bits of mantissa fewer: errors 2^7 times as large, and the divergence grows with their square.
        self.assertGreater(of["fp8"], of["f16"] * 2**14 / 4)
        self.assertLess(of["fp8"], of["f16"] * 2**14 * 4)
        rounded = self.measure("--dtype-kv", "fp8")
        self.assertEqual(rounded["perplexity"], self.measure("--dtype-kv", "fp8", "--chunk-tokens", "7")["perplexity"])
        self.assertIn("--dtype-kv", run("perplexity", F16_MODEL, "--dtype-kv", "fp4", code=2)[1])

    def test_divergence_from_a_base(self):
        base = self.path("base")
        fp16 = self.measure("--save-base", base)
        same = self.measure("--kld-base", base)
        self.assertLess(abs(same["kld"]["mean"]), 1e-6)
        self.assertEqual(same["kld"]["same_top"], 1)
        self.assertAlmostEqual(same["kld"]["base_perplexity"] / fp16["perplexity"], 1, places=3)
        fp8 = self.measure("--kld-base", base, "--precision", "fp8")
        self.assertGreater(fp8["kld"]["mean"], 1e-5)
        self.assertIn("chunks", failure("perplexity", F16_MODEL, "--file", self.path("text"), "--ctx", "64", "--chunks", "3",
                                        "--kld-base", base))
        with open(base, "r+b") as file:
            file.truncate(1000)
        failure("perplexity", F16_MODEL, "--file", self.path("text"), "--ctx", "64", "--chunks", "4", "--kld-base", base)

    def test_bad_input(self):
        failure("perplexity", F16_MODEL, "--file", self.path("none"))
        with open(self.path("short"), "w") as file:
            file.write("x")
        self.assertIn("--ctx", failure("perplexity", F16_MODEL, "--file", self.path("short")))
        if os.path.exists("/dev/full"):
            os.symlink("/dev/full", self.path("full"))
            save = ("perplexity", F16_MODEL, "--file", self.path("text"), "--ctx", "64", "--save-base")
            self.assertIn("No space left", failure(*save, self.path("full")))
            self.assertTrue(os.path.islink(self.path("full")))
            failure(*save, "/no/such/dir/base")

    def test_a_file_that_is_mounted_is_refused_before_it_is_computed(self):
        script = 'mount --bind "$0" "$1" || exit 77; shift; exec "$@"'
        report, mounted = self.path("report"), self.path("mounted")
        for name in (report, mounted):
            pathlib.Path(name).touch()
        for words in (["perplexity", "--save-base", mounted], ["evaluate", "--html", mounted]):
            done = subprocess.run(["unshare", "-rm", "sh", "-c", script, report, mounted, PROGRAM, words[0], F16_MODEL,
                                   "--file", self.path("text"), "--ctx", "64", *words[1:]], capture_output=True, text=True, timeout=60)
            if "unshare" in done.stderr or done.returncode == 77:
                self.skipTest(done.stderr)
            self.assertEqual(done.returncode, 1)
            self.assertEqual(done.stderr, f"nestedfp: error: {mounted}: is a mount point, which cannot be replaced; "
                                          "name a file in a directory\n")

    def test_what_is_told_does_not_go_into_a_file(self):
        """With standard error closed the file's number would be that of standard error."""
        base, other = self.path("base"), self.path("other")
        self.measure("--save-base", base)
        words = [PROGRAM, "perplexity", F16_MODEL, "--file", self.path("text"), "--ctx", "64", "--chunks", "4", "--save-base"]
        subprocess.run(["sh", "-c", '"$@" 2>&-', "sh", *words, other], check=True, stdout=subprocess.DEVNULL, timeout=60)
        self.assertEqual(pathlib.Path(other).read_bytes(), pathlib.Path(base).read_bytes())

    def test_files_are_opened_before_calibrating(self):
        kept = pathlib.Path(os.environ["XDG_CACHE_HOME"], "nestedfp", "calibration")
        before = sorted(kept.glob("*"))
        for flag, name in (("--kld-base", self.path("none")), ("--kld-base", self.path("text")),
                           ("--save-base", self.path("no/such/base"))):
            line = failure("perplexity", F16_MODEL, "--file", self.path("text"), "--ctx", "64", "--calibrate", "self",
                           "--calibrate-seed", "78", flag, name)
            self.assertIn(name, line)
        self.assertEqual(sorted(kept.glob("*")), before)

    def test_texts_that_are_too_short_are_told_before_calibrating(self):
        kept = pathlib.Path(os.environ["XDG_CACHE_HOME"], "nestedfp", "calibration")
        before = sorted(kept.glob("*"))
        short = self.path("short")
        with open(short, "w") as file:
            file.write("x")
        own = ("--calibrate", "self", "--calibrate-seed", "79")
        for line in (failure("perplexity", F16_MODEL, "--file", short, "--ctx", "64", *own),
                     failure("evaluate", F16_MODEL, "--file", short, "--ctx", "64", *own)):
            self.assertRegex(line, r"the text has \d+ tokens, less than one chunk of --ctx 64")
        base = self.path("base")
        self.measure("--save-base", base)
        line = failure("perplexity", F16_MODEL, "--file", self.path("text"), "--ctx", "32", "--kld-base", base, *own)
        self.assertIn("was made with --ctx 64", line)
        self.assertEqual(sorted(kept.glob("*")), before)

    def test_text_that_is_calibrated_on_and_measured_is_told(self):
        text, other = self.path("text"), self.path("other")
        with open(text) as one, open(other, "w") as two:
            two.write(one.read() + " again")
        for verb in ("perplexity", "evaluate"):
            measure = (verb, F16_MODEL, "--file", text, "--ctx", "64", "--chunks", "1", "--calibrate-tokens", "64")
            for on, told in ((text, True), (other, False), ("self", False)):
                self.assertEqual("are the same text" in run(*measure, "--calibrate", on)[1], told, (verb, on))

    def test_nothing_is_calibrated_where_no_form_of_it_is_asked_for(self):
        kept = pathlib.Path(os.environ["XDG_CACHE_HOME"], "nestedfp", "calibration")
        before = sorted(kept.glob("*"))
        measure = ("evaluate", F16_MODEL, "--file", self.path("text"), "--ctx", "64", "--chunks", "1", "--json", "--calibrate", "self",
                   "--calibrate-seed", "81", "--calibrate-tokens", "64")
        out, err = run(*measure, "--forms", "nearest", "per channel")
        self.assertEqual({form["weights"] for form in json.loads(out)["forms"]}, {"FP16", "nearest", "per channel"})
        self.assertIn("--calibrate: nothing is calibrated", err)
        self.assertEqual(sorted(kept.glob("*")), before)
        out, err = run(*measure, "--calibrate-smooth", "--forms", "smoothed, 100 % in FP8, activations 16")
        self.assertEqual([form["weights"] for form in json.loads(out)["forms"]], ["FP16", "smoothed"])
        self.assertIn("smoothed", json.loads(out)["calibration"])
        out, err = run(*measure, "--forms", "calibrated, 100 % in FP8, activations 16")
        self.assertEqual([form["weights"] for form in json.loads(out)["forms"]], ["FP16", "calibrated"])
        self.assertNotIn("nothing is calibrated", err)

    def test_texts_that_are_none_are_refused(self):
        with open(self.path("other"), "w", encoding="utf-16") as file:
            file.write("the quick brown fox jumps over the lazy dog. " * 100)
        for verb in ("perplexity", "evaluate"):
            line = failure(verb, F16_MODEL, "--file", self.path("other"), "--ctx", "64")
            self.assertIn(f"--file: {self.path('other')}: is not UTF-8", line)

    def test_a_base_of_a_longer_text(self):
        base = self.path("base")
        self.measure("--save-base", base)
        with open(self.path("text"), "w") as file:
            file.write("the quick brown fox jumps over the lazy dog. " * 5)
        line = failure("perplexity", F16_MODEL, "--file", self.path("text"), "--ctx", "64", "--kld-base", base)
        self.assertNotIn("use --chunks", line)  # which would not help
        self.assertIn("this text has only", line)

    @unittest.skipIf(os.environ.get("NFP_SANITIZE"), "a sanitizer's own memory would count")
    def test_long_chunks_of_a_large_vocabulary_take_little_memory(self):
        sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "models"))
        import numpy
        import safetensors_file

        wide = self.path("wide")
        shutil.copytree(F16_MODEL, wide)
        config = json.loads(pathlib.Path(wide, "config.json").read_text())
        config.update(vocab_size=40000, max_position_embeddings=4096)
        pathlib.Path(wide, "config.json").write_text(json.dumps(config))
        for name in os.listdir(wide):
            if name.endswith(".safetensors"):
                tensors = safetensors_file.read(os.path.join(wide, name))
                for tensor, (dtype, array) in list(tensors.items()):
                    if tensor == "model.embed_tokens.weight":
                        tensors[tensor] = (dtype, numpy.resize(array, (40000, array.shape[1])))
                safetensors_file.write(os.path.join(wide, name), tensors)
        with open(self.path("text"), "a") as file:
            file.write("the quick brown fox jumps over the lazy dog. " * 200)
        result = json.loads(run("perplexity", wide, "--file", self.path("text"), "--ctx", "4096", "--chunks", "1", "--json")[0])
        self.assertEqual(result["scored_tokens"], 2047)
        # The logits of all scored tokens alone would be 328 MB.
        self.assertLess(result["peak_memory_bytes"], 250e6)

    def test_figures_go_to_what_is_named(self):
        evaluate = ("evaluate", F16_MODEL, "--file", self.path("text"), "--ctx", "64", "--chunks", "2", "--forms", "nearest",
                    "--no-activations", "--json-file")
        os.symlink("/dev/null", self.path("null"))
        run(*evaluate, self.path("null"))
        self.assertTrue(os.path.islink(self.path("null")))
        self.assertIn("--forms neerest", run(*evaluate, self.path("null"), "--forms", "neerest")[1])
        out, _ = run(*evaluate, "/dev/stdout", "--json")
        decoder = json.JSONDecoder()
        one, end = decoder.raw_decode(out)
        self.assertEqual(one, json.loads(out[end:]))
        self.assertIn("--shares", failure(*evaluate, "/dev/null", "--shares", "0.5", code=2))  # of no order
        # A calibrated checkpoint's rows say on what as well.
        nested = self.path("nested")
        run("convert", F16_MODEL, nested, "--calibrate", "self", "--calibrate-tokens", "512")
        out, _ = run("evaluate", nested, *evaluate[2:-1], "--html", self.path("html"), "--json")
        self.assertEqual(json.loads(out)["calibration"], "the model's own text, 512 tokens, free choice")
        self.assertIn("Calibrated on the model's own text", pathlib.Path(self.path("html")).read_text())
        if os.path.exists("/dev/full"):  # what was computed is shown all the same
            out, err = run(*evaluate, self.path("null"), "--html", "/dev/full", code=1)
            self.assertIn("nearest", out)
            self.assertIn("No space left", err)


class Bench(Scratch):
    def test_json_has_every_row(self):
        out, _ = run("bench", F16_MODEL, "--batch", "1", "3", "--prompt", "40", "--generate", "8", "--repeats", "1",
                     "--precisions", "fp16,fp8,fp8-w8a8", "--json")
        rows = json.loads(out)["rows"]
        self.assertEqual(len(rows), 3 + 2 * 3)
        for row in rows:
            self.assertGreater(row["tokens_per_s"], 0)
            self.assertLessEqual({"q/k/v", "o", "gate/up", "down", "lm_head", "embed"}, set(row["stage_us"]))

    def test_more_sequences_than_a_server_lets_wait(self):
        out, _ = run("bench", F16_MODEL, "--batch", "1030", "--prompt", "1", "--context", "1", "--generate", "2", "--repeats", "1",
                     "--precisions", "fp16", "--step-tokens", "2048")
        self.assertIn("1030", out)

    def test_shares_are_of_what_a_precision_computes_on(self):
        out, _ = run("bench", F16_MODEL, "--batch", "1", "--prompt", "16", "--context", "2", "--generate", "2", "--repeats", "1",
                     "--precisions", "fp16,fp8", "--machine", "--json")
        report = json.loads(out)
        fp32, tiles = report["machine"]["fma_gflop_per_s"], report["machine"]["tile_gflop_per_s"]
        for row in report["rows"]:
            limit = row["gflop_per_s"] / row["share_of_arithmetic"]
            if ", amx, " in report["device"]:  # of FP16 three products each
                self.assertAlmostEqual(limit / tiles, 1 / 3 if row["precision"] == "fp16" else 1)
            elif row["precision"] == "fp16":
                self.assertAlmostEqual(limit / fp32, 1)

    def test_names_that_are_not_utf8(self):
        """What was measured is printed all the same."""
        folder = os.path.join(self.dir.encode(), b"b\xffd")
        os.makedirs(folder)
        trace = os.path.join(folder, b"trace.csv")
        with open(trace, "w") as file:
            file.write("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,12,3\n")
        model = shutil.copytree(F16_MODEL.encode(), os.path.join(folder, b"model"))
        short = ["--repeats", "1", "--precisions", "fp16", "--json"]
        latency, _ = run("bench", model, "latency", "--batch", "1", "--input", "4", "--output", "2", *short)
        self.assertEqual(len(json.loads(latency)["rows"]), 1)
        throughput, _ = run("bench", F16_MODEL, "throughput", "--requests", "1", "--trace", trace, "--ctx", "64", *short)
        self.assertTrue(json.loads(throughput)["trace"].endswith("b\ufffdd/trace.csv"))
        self.assertIn("--model is not UTF-8", failure("replay", trace, "--url", "http://127.0.0.1:1", "--model", b"\xff", code=2))

    def test_prompts_that_take_more_steps_than_a_sequence_is_to_decode(self):
        """A sequence goes on until all of them decode."""
        long = ["bench", F16_MODEL, "--batch", "4", "--prompt", "4", "--generate", "2", "--repeats", "1", "--step-tokens", "16",
                "--precisions", "fp16", "--json"]
        rows = json.loads(run(*long, "--context", "40")[0])["rows"]
        self.assertGreater(rows[1]["tokens_per_s"], 0)
        with open(os.path.join(F16_MODEL, "config.json")) as file:
            most = json.load(file)["max_position_embeddings"]
        self.assertIn("before the last prompt is computed", failure(*long, "--context", str(most - 2), code=2))

    def test_precision_is_another_name_of_precisions(self):
        small = ["bench", F16_MODEL, "--batch", "1", "--prompt", "4", "--generate", "2", "--repeats", "1"]
        for flags in (["--precision", "fp8"], ["--precisions", "fp8", "--baseline", "fp8-channel"]):
            rows = json.loads(run(*small, *flags, "--json")[0])["rows"]
            self.assertEqual({row["precision"] for row in rows}, {"fp8"})
        self.assertIn("--baseline fp8-channel has no FP16", failure(*small, "--baseline", "fp8-channel", code=2))

    def test_latency(self):
        out, err = run("bench", F16_MODEL, "latency", "--batch", "1", "3", "--input", "20", "--output", "8", "--repeats",
                       "2", "--precisions", "fp16,fp8-w8a8", "--breakdown", "--json")
        found = json.loads(out)
        self.assertEqual([(r["batch"], r["precision"]) for r in found["rows"]],
                         [(1, "fp16"), (1, "fp8-w8a8"), (3, "fp16"), (3, "fp8-w8a8")])
        for row in found["rows"]:
            self.assertEqual((row["input"], row["output"], len(row["step_ms_repeats"])), (20, 8, 2))
            self.assertGreater(row["ttft_ms"], 0)
            self.assertGreaterEqual(row["ttft_last_ms"], row["ttft_ms"])
            self.assertGreaterEqual(row["step_p99_ms"], row["step_ms"])
            self.assertGreater(row["step_ms"], 0)
        # A line a row, a table a step.
        tables = [line for line in err.splitlines() if " us in all" in line]
        self.assertEqual(len(tables), 8)
        self.assertEqual(len(err.splitlines()), 4 + sum(2 + len(b["stages"]) for b in found["breakdown"]))
        steps = {(b["step"], b["batch"], b["precision"]): b for b in found["breakdown"]}
        self.assertEqual(len(steps), 8)
        # Both precisions multiply the same matrices; 16 or 8 bits a weight are read.
        for name in ("q/k/v", "o", "gate/up", "down"):
            linear = {key: next(s for s in b["stages"] if s["stage"] == name) for key, b in steps.items()}
            for batch in (1, 3):
                exact, fast = linear["decode", batch, "fp16"], linear["decode", batch, "fp8-w8a8"]
                self.assertEqual((exact["precision"], fast["precision"]), ("fp16", "fp8-w8a8"))
                self.assertEqual(exact["flops"], fast["flops"])
                self.assertEqual(exact["flops"], batch * linear["decode", 1, "fp16"]["flops"])
                self.assertGreater(exact["weight_bytes"], fast["weight_bytes"])
        for step in steps.values():
            self.assertAlmostEqual(step["us"], sum(s["us"] for s in step["stages"]), places=3)
            for stage in step["stages"]:
                self.assertGreater(stage["activation_bytes"], 0, stage)
                self.assertNotIn("share_of_limit", stage)  # nobody measured the machine

    def breakdown(self, *flags):
        file = self.path("breakdown.json")
        out, _ = run("bench", F16_MODEL, "latency", "--batch", "2", "--input", "20", "--output", "4", "--repeats", "1",
                     "--precisions", "fp8", "--breakdown", *flags, "--json")
        pathlib.Path(file).write_text(out)
        return file, json.loads(out)

    def test_a_breakdown_with_limits_as_a_table(self):
        file, report = self.breakdown("--machine")
        self.assertEqual(report["limits"]["source"], "measured")
        for step in report["breakdown"]:
            for stage in step["stages"]:
                self.assertGreater(stage["share_of_limit"], 0)
                self.assertIn(stage["limited_by"], ("memory", "arithmetic"))
        text = subprocess.run([sys.executable, PLOT, file, "--table"], capture_output=True, text=True, check=True).stdout
        self.assertEqual(text.count("| gate/up | fp8 |"), 2)
        self.assertIn("decode, batch 2", text)
        self.assertIn("limits: measured", text)

    def test_a_breakdown_as_a_plot(self):
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            self.skipTest("matplotlib is not installed")
        file, _ = self.breakdown()
        svg = self.path("breakdown.svg")
        subprocess.run([sys.executable, PLOT, file, svg], check=True)
        self.assertIn("<svg", pathlib.Path(svg).read_text())

    def test_latency_of_the_first_token_alone(self):
        row, = json.loads(run("bench", F16_MODEL, "latency", "--batch", "1", "--input", "40", "--output", "1",
                              "--step-tokens", "16", "--precisions", "fp16", "--json")[0])["rows"]
        self.assertGreater(row["ttft_ms"], 0)
        self.assertNotIn("step_ms", row)

    def test_rows_are_what_is_printed_without_json(self):
        for mode in ("latency", "--batch", "1"), ("throughput", "--requests", "2"):
            out, err = run("bench", F16_MODEL, *mode, "--input", "9", "--output", "4", "--repeats", "1", "--precisions", "fp16,fp8")
            self.assertRegex(out, r"(?s)^fp16 .*first token.*\nfp8 .*first token")
            self.assertEqual(err, "")

    def test_throughput(self):
        log = self.path("steps.csv")
        out, _ = run("bench", F16_MODEL, "throughput", "--requests", "2", "5", "--input", "9", "--output", "6",
                     "--max-sequences", "3", "--repeats", "1", "--json", "--step-log", log)
        rows = json.loads(out)["rows"]
        self.assertEqual([r["requests"] for r in rows], [2, 2, 5, 5])
        for row in rows:
            self.assertEqual((row["input_tokens"], row["output_tokens"]), (9 * row["requests"], 6 * row["requests"]))
            self.assertAlmostEqual(row["output_tokens_per_s"], row["output_tokens"] / row["seconds"])
            self.assertGreaterEqual(row["ttft_p99_ms"], row["ttft_mean_ms"])
            self.assertEqual(row["max_sequences"], 3)
        self.assertGreaterEqual(rows[2]["steps"], 12)  # two rounds: three sequences at once
        with open(log) as file:
            steps = list(csv.DictReader(file))
        last = steps[-rows[-1]["steps"]:]
        self.assertEqual(sum(int(step["prefill_tokens"]) for step in last), rows[-1]["input_tokens"])
        self.assertEqual({step["precision"] for step in last}, {rows[-1]["precision"]})
        self.assertIn("--step-log", failure("bench", F16_MODEL, "throughput", "--step-log",
                                             self.path("no/such.csv"), code=2))

    def test_throughput_of_a_trace(self):
        trace = self.path("trace.csv")
        with open(trace, "w") as file:
            file.write("TIMESTAMP,ContextTokens,GeneratedTokens\nx,5,3\nx,9999,3\nx,7,4\n")
        arguments = ["bench", F16_MODEL, "throughput", "--trace", trace, "--ctx", "64", "--repeats", "1", "--precisions",
                     "fp16", "--json"]
        row, = json.loads(run(*arguments, "--requests", "2")[0])["rows"]
        self.assertEqual((row["input_tokens"], row["output_tokens"]), (12, 7))
        self.assertIn("2 requests fit", failure(*arguments, "--requests", "3"))
        self.assertIn("--input excludes --trace", run(*arguments, "--input", "4", code=2)[1])

    def test_steps(self):
        out, _ = run("bench", F16_MODEL, "steps", "--prefill", "8", "40", "--sequences", "1", "3", "--contexts", "12",
                     "--mixed", "10", "--step-tokens", "32", "--decode-steps", "4", "--repeats", "2", "--precisions",
                     "fp16,fp8")
        table = json.loads(out)
        self.assertEqual((table["format"], table["version"]), ("nestedfp-step-times", 1))
        self.assertEqual([level["precision"] for level in table["levels"]], ["fp16", "fp8"])
        self.assertEqual(table["steps_in_flight"], 1)
        for level in range(2):
            kinds = [(s["prefill_tokens"], s["prefill_context"], s["decode_sequences"]) for s in table["steps"]
                     if s["level"] == level]
            # 40 tokens come as 32 and 8 more.
            self.assertEqual(sorted(kinds), sorted([(8, 0, 0), (32, 0, 0), (8, 32, 0), (0, 0, 1), (10, 0, 1), (0, 0, 3),
                                                    (10, 0, 3)]))
        for step in table["steps"]:
            self.assertGreater(step["ms"], 0)
            self.assertEqual(step["decode_context"] > 12, step["decode_sequences"] > 0)

    def test_a_step_that_is_asked_for_twice_comes_once(self):
        out, _ = run("bench", F16_MODEL, "steps", "--prefill", "8", "8", "--sequences", "2", "2", "--contexts", "12", "12", "--mixed", "4",
                     "--decode-steps", "2", "--repeats", "1", "--precisions", "fp16")
        steps = json.loads(out)["steps"]
        self.assertEqual([(step["prefill_tokens"], step["decode_sequences"]) for step in steps], [(8, 0), (0, 2), (4, 2)])

    def test_flags_of_no_mode(self):
        self.assertIn("--prompt", failure("bench", F16_MODEL, "--prompt", "8", "latency", code=2))
        self.assertIn("--input and --output: a context of", failure("bench", F16_MODEL, "latency", "--input", "100000", code=2))
        for mode in ("throughput", "steps"):
            self.assertIn("--machine is not", failure("bench", F16_MODEL, mode, "--machine", code=2))
        for mode in ("latency", "throughput", "steps"):
            self.assertIn("xample", run("bench", F16_MODEL, mode, "--help")[0])


class Chat(Scratch):
    def test_commands_from_a_pipe(self):
        script = "hello there\n/stats\n/precision fp8\nagain\n/precision nonsense\n/precision graded:1:4\n/reset\n/help\n/bogus\n/quit\nnot reached\n"
        for end in ("\n", "\r\n"):
            out, err = run("chat", F16_MODEL, "-n", "8", "--seed", "1", stdin=script.replace("\n", end))
            self.assertIn("last answer", out)
            self.assertIn("(precision fp8)", out)
            self.assertRegex(out, "'nonsense' is unknown; use .*alternate:STEPS")
            self.assertNotIn("graded:LOW:HIGH", out)
            self.assertIn("graded:1:4 needs an order of sensitivity", out)
            self.assertIn("(conversation forgotten)", out)
            self.assertIn("unknown command /bogus", out)

    def test_text_that_is_not_utf8(self):
        done = subprocess.run([PROGRAM, "chat", F16_MODEL, "-n", "2"], input=b"gr\xfc\xdfe\nhello\n", capture_output=True, timeout=60)
        self.assertEqual(done.stderr, b"nestedfp: error: the line is not UTF-8, and was left out\n")
        self.assertEqual(done.returncode, 1)
        self.assertNotEqual(done.stdout, b"")  # the next one is answered
        self.assertIn("--system is not UTF-8", failure("chat", "/nowhere", "--system", b"\xff", code=2))

    def test_a_line_without_end(self):
        with open("/dev/zero", "rb") as zero:
            done = subprocess.run([PROGRAM, "chat", F16_MODEL], stdin=zero, capture_output=True, text=True, timeout=60)
        self.assertEqual(done.stderr, "nestedfp: error: standard input: a line is longer than the 16777216 bytes allowed here\n")
        self.assertEqual(done.returncode, 1)

    def test_a_terminal_takes_all_characters(self):
        for locale in ("C", "C.UTF-8"):
            ours, theirs = pty.openpty()
            process = subprocess.Popen([PROGRAM, "chat", F16_MODEL, "-n", "2"], stdin=theirs, stdout=theirs,
                                       stderr=subprocess.DEVNULL, env={**os.environ, "LC_ALL": locale, "TERM": "xterm"})
            os.close(theirs)
            os.write(ours, "/precision größer漢字\n/quit\n".encode())
            said = b""
            try:
                while piece := os.read(ours, 4096):
                    said += piece
            except OSError:  # all that it said is read
                pass
            os.close(ours)
            self.assertEqual(process.wait(timeout=60), 0)
            self.assertIn("precision policy 'größer漢字' is unknown", said.decode(errors="replace"), locale)

    def test_a_template_in_a_file_of_its_own(self):
        model = self.path("model")
        shutil.copytree(F16_MODEL, model)
        settings = pathlib.Path(model, "tokenizer_config.json")
        config = json.loads(settings.read_text())
        config.pop("chat_template", None)
        settings.write_text(json.dumps(config))
        self.assertIn("no chat template", failure("chat", model, "-n", "2"))
        pathlib.Path(model, "chat_template.json").write_text(json.dumps({"chat_template": "{{ raise_exception('of its own') }}"}))
        _, err = run("chat", model, "-n", "2", stdin="hi\n", code=1)  # the exit status of a script's chat that failed
        self.assertIn("of its own", err)
        settings.write_text(json.dumps({**config, "cls_token": {"content": "[CLS]"}, "pad_token": "[PAD]", "sep_token": None}))
        shown = "{{ raise_exception(cls_token ~ pad_token ~ (sep_token is defined)) }}"
        pathlib.Path(model, "chat_template.json").write_text(json.dumps({"chat_template": shown}))
        self.assertIn("[CLS][PAD]False", run("chat", model, "-n", "2", stdin="hi\n", code=1)[1])
        settings.write_text(json.dumps({**config, "boi_token": "<boi>", "additional_special_tokens": ["<x>", "<y>"]}))
        shown = "{{ raise_exception(boi_token ~ additional_special_tokens[1] ~ (cls_token is defined)) }}"
        pathlib.Path(model, "chat_template.json").write_text(json.dumps({"chat_template": shown}))
        self.assertIn("<boi><y>False", run("chat", model, "-n", "2", stdin="hi\n", code=1)[1])

    def test_ctrl_c_stops_the_answer_only(self):
        process = subprocess.Popen([PROGRAM, "chat", F16_MODEL, "--ignore-eos", "--ctx", "256"], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        process.stdin.write("go on\n")
        process.stdin.flush()
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        out, _ = process.communicate("/stats\n/quit\n", timeout=120)
        self.assertEqual(process.returncode, 0)
        self.assertIn("policy fp16", out)


@unittest.skipUnless(DEMO and os.path.exists(DEMO), "NFP_DEMO_MODEL does not name the demo model; scripts/test fetches it")
class Demo(Scratch):
    def test_ctrl_c_leaves_nothing_half_written(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            process = subprocess.Popen([PROGRAM, "convert", DEMO, self.path("out"), "--calibrate", "none"],
                                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            while not any("tmp" in name for name in os.listdir(self.path("."))):
                self.assertIsNone(process.poll(), "it ended before it wrote")
                time.sleep(0.001)
            process.send_signal(number)
            self.assertEqual(process.wait(60), -number)
            self.assertEqual(os.listdir(self.path(".")), [])

    def test_inspect_shows_what_row_exponents_add(self):
        report = json.loads(run("inspect", DEMO, "--json")[0])
        text = json.dumps(report)
        self.assertIn("210", text)
        self.assertIn("152", text)
        self.assertIn("673", text)

    def test_it_knows_a_capital_in_both_precisions(self):
        for precision in ["fp16", "fp8", "fp8-w8a8"]:
            out, _ = run("generate", DEMO, "-p", "The capital of France is", "-n", "8", "-q", "--precision", precision)
            self.assertIn("Paris", out)

    def test_chat_answers_a_new_users_first_questions(self):
        # As scripts/quickstart leaves it: how the model is sampled lies beside it.
        model = self.path("demo.gguf")
        os.symlink(os.path.abspath(DEMO), model)
        shutil.copy(os.path.join(os.path.dirname(__file__), "../../scripts/demo/generation_config.json"),
                    self.path("demo.generation_config.json"))
        out, _ = run("chat", model, "-n", "60", stdin="What is the capital of France?\nWhy is the sky blue?\nWhat is 2 + 2?\n")
        self.assertIn("Paris", out.splitlines()[0])
        self.assertIn("Rayleigh scattering", out)
        self.assertEqual(json.loads(run("inspect", model, "--json")[0])["sampling"], {"temperature": 0.0})

    def test_chat_answers(self):
        out, _ = run("chat", DEMO, "-n", "40", "--temperature", "0", stdin="What is the capital of France?\n/quit\n")
        self.assertIn("Paris", out)

    @unittest.skipIf(os.environ.get("NFP_SANITIZE"), "a sanitizer's own memory would count")
    def test_weights_are_held_once(self):
        answer = json.loads(run("generate", DEMO, "-p", "Hello", "-n", "4", "--ctx", "512", "--json")[0])
        fp16_size = 134_515_008 * 2
        kv = 512 * 30 * 2 * 3 * 64 * 2
        self.assertLess(answer["weight_bytes"], fp16_size * 1.01)
        self.assertLess(answer["peak_memory_bytes"], fp16_size + 60 * 2**20 + kv)

    def test_convert_and_restore(self):
        run("convert", DEMO, self.path("nested"), "--calibrate", "none", timeout=600)
        one = run("generate", DEMO, "-p", "Once upon a time", "-n", "16", "-q")[0]
        self.assertEqual(one, run("generate", self.path("nested"), "-p", "Once upon a time", "-n", "16", "-q")[0])
        run("restore", self.path("nested"), self.path("plain"), timeout=600)
        self.assertEqual(one, run("generate", self.path("plain"), "-p", "Once upon a time", "-n", "16", "-q")[0])


if __name__ == "__main__":
    main()
