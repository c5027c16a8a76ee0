"""Flags of `nestedfp serve`: each is explained in the table of docs/serving.md; and what a start says of its caches."""

import json
import os
import re
import resource
import subprocess
import unittest
import urllib.request

from program import F16_MODEL, PROGRAM, Scratch, failure, main, run

DOCS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "docs", "serving.md")


class ServeFlags(unittest.TestCase):
    def test_docs_have_them_all(self):
        with open(DOCS, encoding="utf-8") as file:
            text = file.read()
        rows = [line for line in text.split("## Flags")[1].split("\n## ")[0].splitlines() if line.startswith("|")]
        explained = set(re.findall(r"--[a-z0-9][a-z0-9-]*", " ".join(line.replace("\\|", "/").split("|")[1] for line in rows)))
        flags = set(re.findall(r"^\s*(?:-\w,)?(--[a-z0-9][a-z0-9-]*)", run("serve", "--help")[0], re.MULTILINE)) - {"--help"}
        self.assertGreater(len(flags), 30)
        self.assertEqual(sorted(flags - explained), [])
        self.assertEqual(sorted(explained - flags), [])


def serving(*flags):
    return [PROGRAM, "serve", F16_MODEL, "--port", "0", "--max-model-len", "16", "--max-num-seqs", "1", "--device", "cpu", *flags]


def told(*flags, **environment):
    """What serve says until it serves."""
    with subprocess.Popen(serving(*flags), env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True) as server:
        lines = []
        for line in server.stderr:
            lines.append(line)
            if line.startswith("ready "):
                break
        server.terminate()
    return "".join(lines)


def wait_until_ready(server):
    for line in server.stderr:
        if line.startswith("ready "):
            break


def address_space(server):
    with open(f"/proc/{server.pid}/status", encoding="ascii") as file:
        return int(re.search(r"VmSize:\s+(\d+) kB", file.read()).group(1)) << 10


class Cache(Scratch):
    def test_a_context_that_the_kv_cache_does_not_hold_is_refused(self):
        said = failure("serve", F16_MODEL, "--port", "0", "--device", "cpu", "--precision", "fp16", "--max-model-len", "512",
                       "--kv-cache-memory", "64KB", code=2, timeout=30)
        self.assertRegex(said, "--max-model-len 512: the KV cache holds [0-9]+ tokens; .*--kv-cache-memory")

    def test_a_folder_that_cannot_be_made_is_named(self):
        cache = self.path("file")
        with open(cache, "w", encoding="utf-8"):
            pass
        self.assertIn(f"{cache}/nestedfp/step-times: cannot be made: Not a directory", told(XDG_CACHE_HOME=cache))


class Start(Scratch):
    def test_a_key_that_is_set_but_empty_is_told(self):
        self.assertIn("NESTEDFP_API_KEY is set but empty", told("--precision", "fp16", NESTEDFP_API_KEY=""))
        for flags, given in ((["--api-key", "secret"], ""), ([], "secret")):
            self.assertNotIn("is set but empty", told("--precision", "fp16", *flags, NESTEDFP_API_KEY=given))

    def test_a_policy_that_is_none_is_refused_with_those_that_are(self):
        said = failure("serve", F16_MODEL, "--port", "0", "--device", "cpu", "--precision-policy", "sometimes", code=2, timeout=30)
        for policy in ("threshold:TOKENS", "graded:LOW:HIGH", "alternate:STEPS", "slo, the default", "slo-fp16", "slo-fp8"):
            self.assertIn(policy, said)

    def test_flags_that_others_make_idle_are_told(self):
        said = told("--precision", "fp16", "--precision-policy", "threshold:8", "--slo-missed", "shed")
        self.assertIn("warning --precision-policy threshold:8: does nothing, as --precision fp16 ", said)
        self.assertIn("warning --slo-missed: does nothing, as only the policy slo goes by it, and this one is fp16", said)
        said = told("--precision-policy", "threshold:8", "--exact-decode", "--fp8-levels", "1")
        for flag in ("--exact-decode", "--fp8-levels"):
            self.assertIn(f"warning {flag}: does nothing, as only the policy slo goes by it, and this one is threshold:8",
                          said)
        self.assertNotIn("does nothing", told("--precision-policy", "slo-fp16", "--slo-missed", "shed"))

    def test_flags_of_fp8_where_there_is_none_are_told(self):
        flags = ("--fp8-share", "0.5", "--fp8-head")
        said = told("--precision", "fp16", *flags)
        for flag in ("--fp8-share", "--fp8-head"):
            self.assertIn(f"warning {flag}: does nothing, as it is of FP8 steps, and --precision fp16 has none", said)
        self.assertNotIn("does nothing", told("--precision", "fp16", "--speculative-tokens", "2", *flags))
        self.assertNotIn("does nothing", told("--precision", "fp8", *flags))

    def test_that_step_times_are_measured_is_told_before(self):
        self.assertRegex(told(XDG_CACHE_HOME=self.path("cache")), "step times are measured now, .*\nstep times measured in ")
        self.assertNotIn("are measured now", told("--precision", "fp16", XDG_CACHE_HOME=self.path("other")))

    def test_step_times_of_something_else_are_told(self):
        path, other = self.path("steps.json"), self.path("other.json")
        steps = run("bench", F16_MODEL, "steps", "--device", "cpu", "--prefill", "8", "16", "--sequences", "1", "2", "--contexts", "8",
                    "--mixed", "8", "--repeats", "1")[0]
        with open(path, "w", encoding="utf-8") as file:
            file.write(steps)
        table = json.loads(steps)
        self.assertNotIn("--step-times", told("--step-times", path))
        said = told("--step-times", path, "--dtype-kv", "fp8")
        self.assertEqual(said.count(f"--step-times {path}: was measured with the "), 1, said)
        self.assertIn("KV cache f16, and this is e4m3", said)
        table |= {"model": "large", "weight_bytes": 8, "device": "abacus"}
        for level in table["levels"]:
            level["precision"] = {"fp16": "fp16", "fp8": "fp8-w8a8", "fp8-w8a8": "fp8"}[level["precision"]]
        with open(other, "w", encoding="utf-8") as file:
            json.dump(table, file)
        said = told("--step-times", other)
        for what in (r"model large \(8 bytes\), and this is .* bytes\)", "device abacus, and this is ", "precision fp8.*, and this is fp8"):
            self.assertRegex(said, f"--step-times {other}: was measured with the {what}")

    def test_wrong_files_are_told_before_weights_are_read(self):
        with open(self.path("wrong.jinja"), "w", encoding="utf-8") as file:
            file.write("{% if %}")
        for flags, code, told in ((["--chat-template", "nowhere"], 2, "--chat-template nowhere: is no file"),
                                  (["--chat-template", self.path("wrong.jinja")], 1, f"'{self.path('wrong.jinja')}' line 1: syntax error"),
                                  (["--generation-config", "/nowhere"], 2, "--generation-config /nowhere")):
            _, said = run("serve", F16_MODEL, "--port", "0", "--device", "cpu", *flags, code=code, timeout=60)
            self.assertIn(told, said)
            self.assertNotIn("weights ", said)
        # A device is looked for after these files and before the weights.
        for verb in ("generate", "chat"):
            said = failure(verb, F16_MODEL, "--device", "cuda", "--generation-config", "/nowhere", code=2, stdin="x")
            self.assertIn("--generation-config /nowhere", said)

    def test_a_chat_template_comes_through_a_pipe(self):
        source, pipe = os.pipe()
        os.write(pipe, b"the template has no {{ messages[0].content }}")
        os.close(pipe)
        flags = ["--precision", "fp16", "--chat-template", f"/dev/fd/{source}"]
        with subprocess.Popen(serving(*flags), stderr=subprocess.PIPE, text=True, pass_fds=[source]) as server:
            os.close(source)
            try:
                url = next(found.group(1) for line in server.stderr if (found := re.match(r"ready +(http\S+)", line)))
                request = urllib.request.Request(url + "/tokenize", json.dumps({"messages": [{"role": "user", "content": "the"}]}).encode(),
                                                 {"Content-Type": "application/json"})
                with urllib.request.urlopen(request) as answer:
                    chat = json.load(answer)["tokens"]
                request.data = json.dumps({"prompt": "the template has no the", "add_special_tokens": False}).encode()
                with urllib.request.urlopen(request) as answer:
                    self.assertEqual(json.load(answer)["tokens"], chat)
            finally:
                server.terminate()

    def test_too_few_open_files_are_told_as_that(self):
        lines = set()
        for most in range(4, 12):
            limits = (most, most)
            done = subprocess.run([PROGRAM, "serve", "no/such-model", "--port", "0"], stderr=subprocess.PIPE, text=True,
                                  preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits))
            lines.update(line for line in done.stderr.splitlines() if "Too many open files" in line)
        listening = [line for line in lines if "cannot listen" in line]
        self.assertTrue(listening, lines)
        for line in listening:
            self.assertIn("ulimit -n", line)
            self.assertNotIn("choose another", line)

    @unittest.skipIf(os.environ.get("NFP_SANITIZE"), "a sanitizer's own memory would count")
    def test_threads_that_the_system_does_not_give_are_told(self):
        """Wherever in the start the limit is met. Most of the address space that a start takes are stacks, 8 MB each."""
        flags = ["--threads", "2", "--io-threads", "1", "--precision", "fp16"]
        with subprocess.Popen(["sh", "-c", 'ulimit -s 8192; exec "$0" "$@"', *serving(*flags)], stderr=subprocess.PIPE,
                              text=True) as server:
            wait_until_ready(server)
            whole = address_space(server) >> 20
            server.terminate()
        refusals = 0
        for megabytes in range(whole - 300, whole + 50, 25):
            limited = ["sh", "-c", f'ulimit -s 8192; ulimit -v {megabytes * 1024}; exec "$0" "$@"']
            with subprocess.Popen(limited + serving(*flags), stderr=subprocess.PIPE, text=True) as server:
                said = []
                for line in server.stderr:
                    said.append(line)
                    if line.startswith("ready "):
                        server.terminate()
            errors = [line for line in said if "error" in line or "terminate" in line]
            self.assertEqual(server.returncode, 1 if errors else 0, said)
            self.assertLessEqual(len(errors), 1, said)
            refusals += any(re.match("nestedfp: error: cannot start a thread: .*ulimit -u", line) for line in errors)
        self.assertGreater(refusals, 0)

    @unittest.skipIf(os.environ.get("NFP_SANITIZE"), "a sanitizer's own memory would count")
    def test_a_stop_signal_needs_no_thread(self):
        with subprocess.Popen(serving("--precision", "fp16"), stderr=subprocess.PIPE, text=True) as server:
            wait_until_ready(server)
            resource.prlimit(server.pid, resource.RLIMIT_AS, (address_space(server),) * 2)
            server.terminate()
            said = server.stderr.read()
        self.assertEqual(server.returncode, 0, said)


if __name__ == "__main__":
    main()
