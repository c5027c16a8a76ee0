#!/usr/bin/env python3
"""Completions, the manual page, serve's configuration file and the doctor: test_shell.py PROGRAM TINY_MODELS [...]

Shells and man that are not installed are named and left out.
"""

import json
import os
import re
import shutil
import subprocess

from program import F16_MODEL, PROGRAM, Scratch, main, run

SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def verbs_and_flags():
    """Every verb with its flags, as --help tells them: (path, set of long flags)."""
    def walk(path):
        # A mode of bench comes after its model.
        out, _ = run(*path[:1], *(["model"] if path[1:] else []), *path[1:], "--help")
        flags = set(re.findall(r"^  (?:-\w,)?(--[\w-]+)", out, re.M))
        yield tuple(path), flags
        inner = out.split("\nSubcommands:\n")
        for verb in re.findall(r"^  ([\w-]+)", inner[1].split("\n\n")[0], re.M) if len(inner) > 1 else []:
            yield from walk([*path, verb])
    return list(walk([]))


COMMANDS = verbs_and_flags()


def check(tool, *arguments):
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


class Completion(Scratch):
    def script(self, shell):
        out, err = run("completion", shell)
        self.assertEqual(err, "")
        path = self.path("nestedfp." + shell)
        with open(path, "w") as file:
            file.write(out)
        return path, out

    def need(self, tool):
        if not shutil.which(tool):
            self.skipTest(f"{tool} is not installed")

    def bash(self, *words):
        """What bash offers for the last of the words."""
        path, _ = self.script("bash")
        # Bash divides a command line at '=' as well.
        split = [part for word in words for part in (re.split("(=)", word) if word.startswith("--") else [word]) if part or word == ""]
        if words[-1].startswith("--") and words[-1].endswith("="):
            split = split[:-1] + ["="] if split[-1] == "=" else split
        quoted = " ".join("'" + word + "'" for word in split)
        text = f"""source {path}; COMP_WORDS=({quoted}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _nestedfp
                   printf '%s\\n' "${{COMPREPLY[@]}}" """
        done = subprocess.run(["bash", "--norc", "-c", text], capture_output=True, text=True, timeout=60, cwd=self.dir,
                              env={**os.environ, "HF_HUB_CACHE": self.path("hub")}, check=True)
        self.assertEqual(done.stderr, "")
        return done.stdout.split()

    def test_every_verb_and_flag_is_known_to_every_shell(self):
        self.assertGreater(len(COMMANDS), 14)
        for shell in ["bash", "zsh", "fish"]:
            _, text = self.script(shell)
            for path, flags in COMMANDS:
                self.assertGreaterEqual(flags, {"--help"}, path)
                for word in [*path, *(flag.removeprefix("--") if shell == "fish" else flag for flag in flags)]:
                    self.assertRegex(text, rf"(^|[^\w-]){re.escape(word)}([^\w-]|$)", shell)

    def test_bash_reads_it(self):
        path, _ = self.script("bash")
        self.assertEqual(check("bash", "-n", path), (0, ""))

    def test_zsh_reads_it(self):
        self.need("zsh")
        path, _ = self.script("zsh")
        self.assertEqual(check("zsh", "-f", "-n", path), (0, ""))
        # And takes it in, as a person's .zshrc would.
        code, text = check("zsh", "-f", "-c", f"autoload -U compinit && compinit -u -d {self.path('dump')} && source {path} && "
                           "whence -w _nestedfp_serve _nestedfp_bench_latency && print $_comps[nestedfp]")
        self.assertEqual((code, text.split()), (0, ["_nestedfp_serve:", "function", "_nestedfp_bench_latency:", "function", "_nestedfp"]))

    def test_bash_offers_what_fits(self):
        for path, flags in COMMANDS:
            offered = self.bash("nestedfp", *path[:1], *(["model"] if len(path) == 2 else []), *path[1:], "--")
            self.assertGreaterEqual(set(offered), flags, path)
            for other in {"--api-key", "--jobs", "--html"} - flags:
                self.assertNotIn(other, offered, path)
        # A mode takes the flags of bench as well, but for those of no mode.
        for mode in ("latency", "throughput", "steps"):
            offered = set(self.bash("nestedfp", "bench", "m", mode, "--"))
            self.assertGreaterEqual(offered, {"--precisions", "--device", "--repeats", "--json"}, mode)
            self.assertFalse({"--prompt", "--generate"} & offered, mode)
            self.assertIn("cuda", self.bash("nestedfp", "bench", "m", mode, "--device", ""), mode)
        verbs = {path[0] for path, _ in COMMANDS if len(path) == 1}
        self.assertEqual(set(self.bash("nestedfp", "")), verbs)
        self.assertEqual(self.bash("nestedfp", "se"), ["serve"])
        for words in [["--device", ""], ["--device", "c"], ["--device="], ["--device=c"]]:
            self.assertIn("cuda", self.bash("nestedfp", "serve", *words), words)
        self.assertEqual(set(self.bash("nestedfp", "bench", "m", "l")), {"latency"})
        os.makedirs(self.path("hub/models--org--name/snapshots/c"))
        os.makedirs(self.path("hub/models--org--name/refs"))
        for name, text in [("refs/main", "c"), ("snapshots/c/config.json", "{}")]:
            with open(self.path("hub/models--org--name/" + name), "w") as file:
                file.write(text)
        with open(self.path("orders.gguf"), "w"):
            pass
        bin_folder = os.path.dirname(os.path.abspath(PROGRAM))
        os.environ["PATH"] = bin_folder + os.pathsep + os.environ["PATH"]
        self.assertEqual(set(self.bash("nestedfp", "chat", "or")), {"orders.gguf", "org/name"})
        self.assertIn("orders.gguf", self.bash("nestedfp", "serve", "--step-times", ""))
        self.assertEqual(set(self.bash("nestedfp", "completion", "")), {"bash", "zsh", "fish"})

    def test_bash_completes_names_with_a_revision_and_a_file(self):
        for ref in ["main", "v2"]:
            for name, text in [(f"refs/{ref}", ref), (f"snapshots/{ref}/a.gguf", ""), (f"snapshots/{ref}/b.gguf", "")]:
                path = self.path("hub/models--org--name/" + name)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "w") as file:
                    file.write(text)
        script, _ = self.script("bash")

        def offered(word, divided, replaced):
            """What replies are there where bash divides `word` so, and puts a reply in the place of its end."""
            line = "nestedfp chat " + word
            text = f"""source {script}; COMP_LINE='{line}'; COMP_POINT={len(line)}; COMP_WORDS=('{os.path.abspath(PROGRAM)}' chat {divided})
                       COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _nestedfp nestedfp '{replaced}' x; printf '%s\\n' "${{COMPREPLY[@]}}" """
            done = subprocess.run(["bash", "--norc", "-c", text], capture_output=True, text=True, timeout=60, cwd=self.dir,
                                  env={**os.environ, "HF_HUB_CACHE": self.path("hub")}, check=True)
            self.assertEqual(done.stderr, "")
            return done.stdout.split()
        # As bash 5.2 calls it.
        self.assertEqual(len(offered("org/n", "org/n", "org/n")), 4)
        self.assertEqual(offered("org/name:", "org/name :", ""), ["a.gguf", "b.gguf"])
        self.assertEqual(offered("org/name:b", "org/name : b", "b"), ["b.gguf"])
        self.assertEqual(offered("org/name@", "org/name @", "@"), ["@v2:a.gguf", "@v2:b.gguf"])
        self.assertEqual(offered("org/name@v", "org/name @ v", "@v"), ["@v2:a.gguf", "@v2:b.gguf"])
        self.assertEqual(offered("org/name@v2:b", "org/name @ v2 : b", "b"), ["b.gguf"])
        # Where a person has taken ':' and '@' out of COMP_WORDBREAKS.
        self.assertEqual(offered("org/name:b", "org/name:b", "org/name:b"), ["org/name:b.gguf"])

    def test_fish_offers_what_fits(self):
        self.need("fish")
        path, _ = self.script("fish")
        self.assertEqual(check("fish", "--no-config", "-n", path), (0, ""))

        def offered(line):
            code, text = check("fish", "--no-config", "-c", f"source {path}; complete -C {json.dumps(line)}")
            self.assertEqual(code, 0, text)
            return {entry.split("\t")[0] for entry in text.splitlines()}
        self.assertEqual(offered("nestedfp se"), {"serve"})
        self.assertEqual(offered("nestedfp completion "), {"bash", "zsh", "fish"})
        self.assertGreaterEqual(offered("nestedfp serve --"), dict(COMMANDS)[("serve",)])
        self.assertEqual(offered("nestedfp serve --device c"), {"cpu", "cuda"})
        self.assertIn("latency", offered("nestedfp bench m lat"))
        self.assertGreaterEqual(offered("nestedfp bench m latency --"), dict(COMMANDS)[("bench", "latency")])
        self.assertNotIn("--api-key", offered("nestedfp chat --"))

    def test_other_shells_are_refused(self):
        run("completion", "tcsh", code=2)


class ManPage(Scratch):
    def setUp(self):
        super().setUp()
        self.text, err = run("man-page")
        self.assertEqual(err, "")
        with open(self.path("nestedfp.1"), "w") as file:
            file.write(self.text)

    def test_every_verb_and_flag_is_in_it(self):
        plain = self.text.replace("\\-", "-")
        for path, flags in COMMANDS:
            if path:
                self.assertIn(".SS nestedfp " + " ".join(path), plain)
            for flag in flags - {"--help"}:
                self.assertIn(f"\\fB{flag}\\fR", plain, path)

    def test_every_environment_variable_is_in_it(self):
        names = set()
        for folder in ["src", "apps"]:
            for place, _, files in os.walk(os.path.join(SOURCE, folder)):
                for name in files:
                    if name.endswith(".cc") and not name.endswith(("_test.cc", "_fuzz.cc")) and "testing" not in place:
                        with open(os.path.join(place, name)) as file:
                            names.update(re.findall(r'(?:getenv|variable)\("(\w+)"\)', file.read()))
        self.assertGreater(len(names), 6)
        for name in names - {"NFP_DEMO_MODEL"}:
            self.assertIn(name, self.text)

    def test_formatters_read_it(self):
        tried = 0
        if shutil.which("mandoc"):
            self.assertEqual(check("mandoc", "-T", "lint", "-W", "error", self.path("nestedfp.1")), (0, ""))
            tried += 1
        if shutil.which("man"):
            done = subprocess.run(["man", "--warnings", "-l", self.path("nestedfp.1")], capture_output=True, text=True,
                                  env={**os.environ, "MANWIDTH": "100", "LC_ALL": "C.UTF-8"}, timeout=60)
            if "has been minimized" not in done.stdout:
                self.assertEqual((done.returncode, done.stderr), (0, ""))
                self.assertIn("nestedfp serve MODEL", re.sub(".\b", "", done.stdout))
                tried += 1
        if tried == 0:
            self.skipTest("neither mandoc nor man is installed")


class ConfigFile(Scratch):
    def fails(self, text, *arguments):
        with open(self.path("serve.toml"), "w") as file:
            file.write(text)
        _, err = run("serve", "--config", self.path("serve.toml"), *arguments, code=2)
        return err

    def test_errors_name_file_line_and_key(self):
        self.assertIn("serve.toml:2: there is no key 'prot'", self.fails('model = "m"\nprot = 8001\n'))
        self.assertIn("serve.toml:1: 'port': ", self.fails('port = "many"\n'))
        self.assertIn("serve.toml:1: 'device': ", self.fails('device = "tpu"\n'))
        self.assertIn('serve.toml:3:8: the value of \'host\' is localhost, not a number, true, false or [...]; text needs quotes: write host = "localhost"',
                      self.fails('[serve]\nmodel = "m"\nhost = localhost\n'))
        self.assertIn("MODEL is required", self.fails("port = 1\n"))
        self.assertIn("--config", run("serve", "--config", self.path("none"), code=2)[1])

    def test_every_flag_of_serve_is_a_key(self):
        for flag in dict(COMMANDS)[("serve",)] - {"--help", "--config"}:
            # A value of a type that no flag has: the key is known, and its value refused.
            line = self.fails(f"{flag[2:]} = []\n{flag[2:]}-x = 1\n", "m")
            self.assertNotIn(f"there is no key '{flag[2:]}';", line)
            self.assertIn(f"'{flag[2:]}", line)

    def test_the_command_line_overrides(self):
        # What each says is visible where it is wrong: the file's policy is not asked for once a flag gives another.
        model = f'model = "{F16_MODEL}"\nport = 0\n'
        self.assertIn("--precision-policy: ", self.fails(model + 'precision-policy = "nonsense-of-the-file"\n'))
        err = self.fails(model + 'precision-policy = "nonsense-of-the-file"\n', "--precision-policy", "nonsense-of-the-flag")
        self.assertIn("nonsense-of-the-flag", err)
        self.assertNotIn("nonsense-of-the-file", err)


class Doctor(Scratch):
    def test_what_it_finds(self):
        out, _ = run("doctor")
        report = json.loads(run("doctor", "--json")[0])
        ids = [finding["id"] for finding in report["findings"]]
        self.assertEqual(len(ids), len(set(ids)))
        self.assertGreaterEqual(set(ids), {"cpu_kernels", "gpu", "gpu_driver", "memory", "huge_pages", "grammars", "libcurl"})
        for finding in report["findings"]:
            self.assertIn(finding["title"], out)
            self.assertIn(finding["health"], {"good", "slower", "missing"})
            self.assertEqual(finding["health"] == "good", finding["cost"] == "", finding)

    def test_kernels_that_are_asked_for(self):
        def kernels(name):
            report = json.loads(run("doctor", "--json", env={**os.environ, "NESTEDFP_CPU": name})[0])
            return report["findings"][0]
        self.assertIn("scalar on ", kernels("scalar")["found"])
        self.assertEqual(kernels("z80")["health"], "missing")
        self.assertIn("z80", kernels("z80")["cost"])

    def test_a_cache_that_cannot_be_written(self):
        with open(self.path("file"), "w"):
            pass
        env = {**os.environ, "HF_HUB_CACHE": self.path("file") + "/hub"}
        report = json.loads(run("doctor", "--json", env=env)[0])
        (cache,) = [finding for finding in report["findings"] if finding["id"] == "model_cache"]
        self.assertEqual(cache["health"], "missing")


if __name__ == "__main__":
    main()
