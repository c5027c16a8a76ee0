"""Every flag of every verb that takes a number refuses what is none, what does not fit and NaN, which lies in no range
and yet in every one that is written as two comparisons. The error names the flag, and nothing has been done."""

import json
import os
import re
import shutil
import subprocess
import tempfile
import unittest

from program import F16_MODEL, PROGRAM, failure, main, run

VERBS = [["generate"], ["chat"], ["convert"], ["restore"], ["inspect"], ["perplexity"], ["bench"], ["bench", "latency"],
         ["bench", "throughput"], ["bench", "steps"], ["serve"], ["replay"], ["evaluate"], ["tune"], ["pull"]]
BAD = {"FLOAT": ["nan", "NAN", "-nan", "inf", "-inf", "1e999", "abc", "", "1.5x"],
       "INT": ["nan", "99999999999999999999999", "-99999999999999999999999", "1.5", "abc", "", "7x", "010"],
       "UINT": ["nan", "99999999999999999999999", "-1", "-0x1", "1.5", "abc", "", "7x", "010"]}
OPTION = re.compile(r"\s+(?:-\w,)?(--[a-z0-9-]+) (FLOAT|INT|UINT)\b(.*)")


def with_verb(words):
    return [words[0], F16_MODEL, words[1]] if len(words) > 1 else words


def number_flags(words):
    return [match.groups() for match in map(OPTION.match, run(*with_verb(words), "--help")[0].splitlines()) if match]


class FlagValues(unittest.TestCase):
    def refuse(self, words, flag, value, apart=False):
        given = [flag, value] if apart else [f"{flag}={value}"]
        done = subprocess.run([PROGRAM, *with_verb(words), *given], capture_output=True, text=True, timeout=60,
                              stdin=subprocess.DEVNULL)
        said = f"{words} {flag}={value!r}: exit code {done.returncode}, {done.stderr[:300]}"
        self.assertEqual(done.returncode, 2, said)
        self.assertIn(flag, done.stderr, said)
        self.assertRegex(done.stderr, r"\Anestedfp: error: .*\n\Z", said)  # one line
        self.assertLess(len(done.stderr), 300, said)  # no limit of 300 digits

    def test_numbers(self):
        flags = 0
        for words in VERBS:
            for flag, kind, more in number_flags(words):
                flags += 1
                for value in BAD[kind]:
                    if value == "7x" and "SIZE" in more:
                        continue  # a unit, though not one that there is
                    self.refuse(words, flag, value)
                self.refuse(words, flag, "", apart=True)  # a variable that is not set
        # What is no number is not said to lie outside of a range.
        for flag, value, what in [("--port", "80.5", "a whole number"), ("--port", "1e3", "a whole number"),
                                  ("--io-threads", "2x", "a whole number"), ("--slo-ttft-ms", "fast", "a number")]:
            self.assertIn(f"{flag}: '{value}' must be {what}", failure("serve", "/nowhere", flag, value, code=2, timeout=30))
        self.assertIn("--port: '0080' must not begin with 0", failure("serve", "/nowhere", "--port", "0080", code=2, timeout=30))
        self.assertIn("--seed", failure("generate", "/nowhere", "-p", "a", "--seed", "", code=2, timeout=30))
        self.assertGreater(flags, 120)

    def test_sizes(self):
        for flag, kind, more in number_flags(["serve"]):
            if "SIZE" in more:
                for value in ["7x", "1.5.5GB", "-1GB", "-1", "99999999999999999999GB"]:
                    self.refuse(["serve"], flag, value)
                for value in ["-1GB", "-1", "-1 b"]:
                    said = failure("serve", "/nowhere", f"{flag}={value}", code=2)
                    self.assertIn(f"{flag}: '{value}' must not be negative", said)

    def test_sampling(self):
        # The engine checks these for the API too, by the names of its fields; here the flags are named.
        for flag, value in [("--temperature", "-1"), ("--top-k", "-2"), ("--top-p", "7"), ("--min-p", "2"),
                            ("--repetition-penalty", "0"), ("--presence-penalty", "3"), ("--frequency-penalty", "-3"),
                            ("--min-tokens", "-1"), ("--stop-token-ids", "-1")]:
            for verb in ["generate", "chat"]:
                # Before the model is there: this one is not.
                words = [verb, "/nowhere", *(["-p", "a"] if verb == "generate" else []), f"{flag}={value}"]
                said = failure(*words, code=2, timeout=30)
                self.assertIn(flag, said)
                self.assertNotRegex(said, "[a-z]_[a-z]", words)
        said = failure("generate", "/nowhere", "-p", "a", "-n", "3", "--min-tokens", "4", code=2, timeout=30)
        self.assertIn("--min-tokens is 4; it must be at most --max-tokens", said)
        self.assertIn("--max-tokens is 9999, but the prompt", failure("generate", F16_MODEL, "-p", "a", "-n", "9999"))
        self.assertIn("--stop-token-ids: token id 9999999 ", failure("generate", F16_MODEL, "-p", "a", "--stop-token-ids", "9999999"))
        said = run("chat", F16_MODEL, "-n", "9999", stdin="hello\n", code=1)[1]
        self.assertNotIn("max_tokens", said)

    def test_empty_names(self):
        """They were as if the flag had not been given."""
        for words, flags in [(["pull", "org/name"], ["--revision", "--file"]), (["generate", "/nowhere"], ["--file"]),
                             (["perplexity", "/nowhere", "--file", __file__], ["--save-base", "--kld-base"]),
                             (["evaluate", "/nowhere", "--file", __file__], ["--html", "--json-file", "--scratch"]),
                             (["replay", __file__, "--simulate", __file__], ["--html", "--json", "--csv", "--url"]),
                             (["replay", __file__], ["--simulate"]), (["tune", "--print"], ["--table"]),
                             (["tune", "/nowhere"], ["--out", "--log-tried"]),
                             (["bench", "/nowhere", "throughput"], ["--trace"]),
                             (["serve", "/nowhere"],
                              ["--step-log", "--step-times", "--chat-template", "--precision-policy"])]:
            for flag in flags:
                self.assertIn(f"{flag}: the name is empty", failure(*words, flag, "", code=2, timeout=30), words)

    def test_texts(self):
        self.assertIn("--served-model-name", failure("serve", F16_MODEL, "--served-model-name", b"\xff", code=2, timeout=30))
        self.refuse(["serve"], "--max-connections", "0")  # nobody could connect
        # Everybody could ask.
        self.assertIn("--api-key-file", failure("serve", F16_MODEL, "--api-key-file", "", code=2, timeout=30))
        for value in ["0", "1000kb"]:
            self.assertIn("--max-request-memory", failure("serve", F16_MODEL, "--max-request-memory", value, code=2, timeout=30))
        for value in ["slef", "/"]:
            said = failure("generate", F16_MODEL, "-p", "a", "--calibrate", value)
            self.assertIn(f"{value}: ", said)
            self.assertIn("--calibrate is self, none or a text file", said)
        # Its text would be gone after the first time that it is read.
        said = failure("generate", F16_MODEL, "-p", "a", "--calibrate", "/dev/stdin", stdin="some text " * 1000, code=2)
        self.assertIn("/dev/stdin: is a pipe or a device", said)

    def test_contexts_beyond_the_models_name_the_flag(self):
        with open(os.path.join(F16_MODEL, "config.json")) as file:
            most = json.load(file)["max_position_embeddings"]
        wanted = f": a context of {most + 1} tokens is wanted, and this model has {most}"
        for words, flag in [(["generate", F16_MODEL, "-p", "a", "--ctx", str(most + 1)], "--ctx"),
                            (["chat", F16_MODEL, "--ctx", str(most + 1)], "--ctx"),
                            (["serve", F16_MODEL, "--port", "0", "--max-model-len", str(most + 1)], "--max-model-len"),
                            (["perplexity", F16_MODEL, "--file", __file__, "--ctx", str(most + 1)], "--ctx"),
                            (["evaluate", F16_MODEL, "--file", __file__, "--ctx", str(most + 1), "--calibrate", "self"], "--ctx"),
                            (["bench", F16_MODEL, "--prompt", str(most)], "--prompt, --context and --generate"),
                            (["bench", F16_MODEL, "latency", "--input", str(most), "--output", "1"], "--input and --output"),
                            (["bench", F16_MODEL, "throughput", "--input", str(most), "--output", "1"], "--input and --output")]:
            self.assertIn(flag + wanted, failure(*words, code=2), words)

    def test_files_that_are_not_there_name_the_flag(self):
        """Before the model is there: this one is not."""
        for words, flag in [(["perplexity", "/nowhere"], "--file"), (["evaluate", "/nowhere"], "--file"),
                            (["generate", "/nowhere"], "--file"), (["bench", "/nowhere", "throughput"], "--trace"),
                            (["serve", "/nowhere", "--port", "0"], "--step-times")]:
            self.assertIn(f"{flag}: /nothing: no such file; ", failure(*words, flag, "/nothing", timeout=30), words)
        said = failure("serve", "/nowhere", "--port", "0", "--step-times", __file__, timeout=30)
        self.assertIn(f"--step-times: {__file__}: ", said)
        self.assertIn("bench MODEL steps", said)

    def test_scratch_folders_that_are_none_are_told_before_calibrating(self):
        words = ["evaluate", F16_MODEL, "--file", __file__, "--ctx", "64", "--calibrate", "self"]
        with tempfile.TemporaryDirectory() as folder:
            nowhere = os.path.join(folder, "nowhere")
            out, err = run(*words, code=2, env={**os.environ, "TMPDIR": nowhere})
            self.assertEqual(out, "")
            self.assertRegex(err, "^nestedfp: error: ")  # and nothing of progress before it
            for said in (f"TMPDIR, now '{nowhere}'", "--scratch"):
                self.assertIn(said, err)
            self.assertIn(f"--scratch {nowhere}: ", failure(*words, "--scratch", nowhere, code=2))

    @unittest.skipIf(shutil.which("nvidia-smi"), "there may be a GPU")
    def test_tune_advises_no_device_that_it_has_not(self):
        with tempfile.TemporaryDirectory() as folder:
            self.assertNotIn("--device cpu", failure("tune", F16_MODEL, "--out", os.path.join(folder, "choices.json")))

    def test_prompts_beyond_the_context_are_not_shown(self):
        out, err = run("generate", F16_MODEL, "-p", "a b c d e f g h i j k l", "--ctx", "4", "-n", "1", code=2)
        self.assertEqual(out, "")
        self.assertEqual(run("generate", F16_MODEL, "-p", "a", "--stop-token-ids", "9999999", code=1)[0], "")
        self.assertRegex(err, r"the prompt has \d+ tokens, .* the context of 4 .*; shorten it, or give a longer --ctx \(this model has")

    def test_modes_of_bench_come_before_or_behind_the_model(self):
        helps = [run("bench", *words, "--help")[0] for words in [["latency"], [F16_MODEL, "latency"]]]
        self.assertEqual(helps[0], helps[1])
        self.assertIn("nestedfp bench latency", helps[0])
        said = run("bench", "latency", code=2)[1]
        self.assertIn("MODEL is required", said)

    def test_gemm_choices(self):
        """A file of `nestedfp tune`: refused on a CPU, and where it is none, before anything else is looked at."""
        words = ["generate", F16_MODEL, "-p", "a", "-n", "1", "--gemm-choices"]
        self.refuse(["generate"], "--gemm-choices", "/nowhere")
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write('{"format": "nestedfp gemm choices 2", "models": {}, "choices": 7}')
            file.flush()
            self.assertIn("--gemm-choices", failure(*words, file.name, "--device", "cpu", code=2))
            said = failure(*words, file.name, "--device", "cuda")
            if "built without CUDA" not in said:
                self.assertIn(f"{file.name}: 'choices' is not a list", said)


if __name__ == "__main__":
    main()
