#!/usr/bin/env python3
"""The files in packaging/: test_files.py PROGRAM SOURCE_ROOT [unittest arguments]"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest

PROGRAM, ROOT = sys.argv[1:3]
FOLDER = os.path.join(ROOT, "packaging")
# What the reference of container files lists.
INSTRUCTIONS = {"ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "ONBUILD", "RUN",
                "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"}


def text_of(name):
    with open(os.path.join(FOLDER, name)) as file:
        return file.read()


def container_instructions():
    """(instruction, its words), with continued lines joined and comments left out."""
    lines = "\n".join(line for line in text_of("Containerfile").splitlines() if not line.lstrip().startswith("#"))
    for line in lines.replace("\\\n", " ").splitlines():
        if line.strip():
            name, _, rest = line.strip().partition(" ")
            yield name, rest.strip()


class Unit(unittest.TestCase):
    def test_systemd_reads_it(self):
        if not shutil.which("systemd-analyze"):
            self.skipTest("there is no systemd-analyze")
        with tempfile.TemporaryDirectory() as folder:
            # The program and its manual page are not installed here: another program stands in.
            unit = text_of("nestedfp.service").replace("ExecStart=/usr/bin/nestedfp", "ExecStart=/bin/true")
            path = os.path.join(folder, "nestedfp.service")
            with open(path, "w") as file:
                file.write(unit)
            done = subprocess.run(["systemd-analyze", "verify", "--man=no", path], capture_output=True, text=True, timeout=60)
            problems = [line for line in done.stderr.splitlines() if "nestedfp" in line]
            self.assertEqual((done.returncode, problems), (0, []), done.stderr)
            with open(path, "w") as file:
                file.write(unit.replace("[Service]\n", "[Service]\nRestartSec=soon\n"))
            done = subprocess.run(["systemd-analyze", "verify", "--man=no", path], capture_output=True, text=True, timeout=60)
            self.assertIn("Failed to parse", done.stderr, "a wrong unit is told from a right one")

    def test_it_starts_what_there_is(self):
        (line,) = re.findall(r"^ExecStart=(.*)$", text_of("nestedfp.service"), re.M)
        program, verb, *arguments = shlex.split(line)
        self.assertEqual((program, verb), ("/usr/bin/nestedfp", "serve"))
        flags = subprocess.run([PROGRAM, "serve", "--help"], capture_output=True, text=True, check=True).stdout
        for argument in arguments:
            if argument.startswith("-"):
                self.assertIn(argument, flags)
        (drain,) = re.findall(r"--drain-timeout .*=(\d+)", flags)
        (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", text_of("nestedfp.service"), re.M)
        self.assertGreater(int(stop), int(drain))

    def test_what_stays_wrong_is_not_started_again(self):
        (status,) = re.findall(r"^RestartPreventExitStatus=(\d+)$", text_of("nestedfp.service"), re.M)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "serve.toml")
            for text in (None, 'modl = "x"\n', 'model = "x"\nport = -1\n'):
                if text is not None:
                    with open(path, "w") as file:
                        file.write(text)
                done = subprocess.run([PROGRAM, "serve", "--config", path], capture_output=True, text=True, timeout=60)
                self.assertEqual(done.returncode, int(status), done.stderr)

    def test_the_example_configuration_is_one(self):
        env = {**os.environ, "HF_HUB_CACHE": "/nowhere"}
        path = os.path.join(FOLDER, "serve.toml")
        done = subprocess.run([PROGRAM, "serve", "--config", path, "--port", "0"], capture_output=True, text=True, env=env, timeout=60)
        self.assertIn("org/name: no such file or directory, and not in the Hugging Face cache", done.stderr)
        # The lines that are commented out are right as well.
        with tempfile.TemporaryDirectory() as folder:
            keys = os.path.join(folder, "keys")
            with open(keys, "w") as file:
                file.write("secret\n")
            text = re.sub(r"^# (?=[a-z-]+ = )", "", text_of("serve.toml"), flags=re.M).replace("/etc/nestedfp/keys", keys)
            self.assertIn("\nslo-itl-ms = 50", text)
            path = os.path.join(folder, "serve.toml")
            with open(path, "w") as file:
                file.write(text)
            done = subprocess.run([PROGRAM, "serve", "--config", path], capture_output=True, text=True, env=env, timeout=60)
            self.assertIn("org/name: no such file or directory", done.stderr)
        try:
            import tomllib
        except ImportError:
            return
        self.assertEqual(tomllib.loads(text_of("serve.toml"))["port"], 8000)


class Container(unittest.TestCase):
    def test_instructions_stages_and_files(self):
        stages, base_arguments = set(), set()
        seen = []
        for name, rest in container_instructions():
            self.assertIn(name, INSTRUCTIONS, rest)
            self.assertTrue(rest, name)
            if name == "ARG" and not seen:
                base_arguments.add(rest.split("=")[0])
                continue
            if not seen:
                self.assertEqual(name, "FROM")
            seen.append(name)
            if name == "FROM":
                words = rest.split()
                for variable in re.findall(r"\$\{(\w+)\}", words[0]):
                    self.assertIn(variable, base_arguments)
                if len(words) > 1:
                    self.assertEqual(words[1].upper(), "AS")
                    stages.add(words[2])
            elif name == "COPY":
                words = rest.split()
                source = [word for word in words if word.startswith("--from=")]
                if source:
                    self.assertIn(source[0].removeprefix("--from="), stages)
                else:
                    for word in words[:-1]:
                        self.assertTrue(os.path.exists(os.path.join(ROOT, word)), word)
            elif name in ("ENTRYPOINT", "CMD") and rest.startswith("["):
                self.assertTrue(all(isinstance(word, str) for word in json.loads(rest)))
            elif name == "RUN":
                done = subprocess.run(["bash", "-n", "-c", rest], capture_output=True, text=True)
                self.assertEqual(done.stderr, "")
                for script in re.findall(r"(?:^|\s)(scripts/\S+)", rest):
                    self.assertTrue(os.access(os.path.join(ROOT, script), os.X_OK), script)
                for preset in re.findall(r"--preset (\S+)", rest):
                    with open(os.path.join(ROOT, "CMakePresets.json")) as file:
                        self.assertIn(preset, [entry["name"] for entry in json.load(file)["configurePresets"]])
        self.assertEqual(seen.count("FROM"), 2)
        self.assertIn("ENTRYPOINT", seen)
        self.assertIn("USER", seen, "a server needs no root")


class Maintainer(unittest.TestCase):
    def test_scripts(self):
        for name in ["postinst", "prerm", "postrm"]:
            path = os.path.join(FOLDER, "debian", name)
            self.assertTrue(os.access(path, os.X_OK), name)
            self.assertEqual(subprocess.run(["sh", "-n", path], capture_output=True).returncode, 0)
            if shutil.which("shellcheck"):
                done = subprocess.run(["shellcheck", path], capture_output=True, text=True)
                self.assertEqual(done.stdout, "")


unittest.main(module="__main__", argv=[sys.argv[0], *sys.argv[3:]], verbosity=2)
