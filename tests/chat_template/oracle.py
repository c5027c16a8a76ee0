"""jinja2 set up as transformers' apply_chat_template sets it up, and a driver that compares it with nfp_render.

With NFP_ORACLE=transformers in the environment it is transformers itself that compiles the templates.

Both sides render the same cases; texts must be equal, and where one fails the other must fail too (the wording of an
error is free). Exit status 77 (skipped) when jinja2 is not installed.
"""

import copy
import datetime
import json
import os
import subprocess
import sys

try:
    import jinja2
    import jinja2.ext
    import jinja2.sandbox
except ImportError:
    print("SKIPPED: the Python package jinja2 is not installed (pip install jinja2); nothing was compared")
    sys.exit(77)


class Generation(jinja2.ext.Extension):
    """{% generation %}, as transformers' AssistantTracker parses it."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_generation"), [], [], body).set_lineno(line)

    def _generation(self, caller):
        return caller()


def make_environment(now):
    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def strftime_now(format):
        return datetime.datetime.fromtimestamp(now).strftime(format)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


class Oracle:
    def __init__(self, now=1_700_000_000):
        self.now = now
        environment = make_environment(now)
        self.compile, self.fixed = environment.from_string, {}
        if os.environ.get("NFP_ORACLE") == "transformers":
            from transformers.utils.chat_template_utils import _compile_jinja_template
            self.compile = _compile_jinja_template
            self.fixed = {"strftime_now": environment.globals["strftime_now"]}  # the test's time, not the present
        self.compiled = {}

    def render(self, case):
        """(text, None) or (None, error message)."""
        source = case["template"]
        try:
            if source not in self.compiled:
                self.compiled[source] = self.compile(source)
            arguments = {"messages": case.get("messages", []), "tools": case.get("tools"), "documents": None,
                         "add_generation_prompt": case.get("add_generation_prompt", False)}
            for token in ("bos_token", "eos_token"):
                if token in case:
                    arguments[token] = case[token]
            arguments.update(case.get("extra", {}), **self.fixed)
            # a copy, because the filter `indent` changes a list that it is applied to
            arguments = copy.deepcopy(arguments)
            text = self.compiled[source].render(**arguments)
            text.encode("utf-8")  # a lone surrogate cannot be a prompt
            return text, None
        except Exception as error:  # whatever a template can raise
            return None, f"{type(error).__name__}: {error}"


def render_ours(program, cases, now):
    lines = "".join(json.dumps({**case, "now": now}) + "\n" for case in cases)
    done = subprocess.run([program], input=lines.encode(), stdout=subprocess.PIPE, check=False)
    results = [json.loads(line) for line in done.stdout.decode().split("\n") if line]
    if done.returncode != 0 or len(results) != len(cases):
        last = cases[len(results)] if len(results) < len(cases) else None
        print(f"FAILED: {program} ended with status {done.returncode} after {len(results)} of {len(cases)} cases; "
              f"the next one is {json.dumps(last)}")
        sys.exit(1)
    return results


def compare(program, cases, label, may_differ=lambda error, text: False):
    """Prints what differs; returns how many did and how many cases failed on both sides."""
    oracle = Oracle()
    different = failed = skipped = 0
    for case, ours in zip(cases, render_ours(program, cases, oracle.now)):
        text, error = oracle.render(case)
        if error is not None and "error" in ours:
            failed += 1
            continue
        if text == ours.get("text") and error is None:
            continue
        if may_differ(ours.get("error", "") + (error or ""), text or ""):
            skipped += 1
            continue
        different += 1
        if different <= 10:
            print(f"--- {label}: {json.dumps({k: v for k, v in case.items() if v}, ensure_ascii=False)[:3000]}")
            print(f"    jinja2: {text!r}" if error is None else f"    jinja2 fails: {error}")
            print(f"    nfp:    {ours['text']!r}" if "text" in ours else f"    nfp fails: {ours['error']}")
    print(f"{label}: {len(cases)} cases, {different} differ, {failed} refused by both"
          + (f", {skipped} outside of what is compared" if skipped else ""))
    return different
