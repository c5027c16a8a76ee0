"""`nestedfp replay --simulate` from outside: formats of traces, reports, the highest rate, replicas, traces that are wrong."""

import csv
import json
import os
import random
import re
import shlex
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from program import PROGRAM, Scratch, failure, main, run


def table():
    """A machine whose FP8 takes 0.6 of FP16's time, but for 1 ms a step."""
    kinds = [(n, 0, 0, 0) for n in (16, 64, 256, 1024)] + [(64, 1000, 0, 0)]
    kinds += [(0, 0, n, 64) for n in (1, 8, 32)] + [(0, 0, 8, 1000)]
    steps = []
    for level, factor in ((0, 1.0), (1, 0.6)):
        for tokens, before, sequences, context in kinds:
            ms = 1 + factor * (6 + 0.08 * (tokens + sequences)) + 1e-5 * tokens * before + 2e-4 * sequences * context
            steps.append({"level": level, "prefill_tokens": tokens, "prefill_context": before, "decode_sequences": sequences,
                          "decode_context": context, "ms": ms, "samples": 1})
    return {"format": "nestedfp-step-times", "version": 1, "model": "m", "device": "d", "weight_bytes": 1, "max_step_tokens": 1024,
            "max_sequences": 32, "kv_dtype": "f16", "levels": [{"precision": "fp16", "fp8_share": 0}, {"precision": "fp8", "fp8_share": 1}],
            "steps": steps}


def requests(count=120, rate=6.0, seed=1):
    """(seconds, prompt tokens, answer tokens), in tenths of a second so that every format holds the same."""
    numbers, now, made = random.Random(seed), 0.0, []
    for _ in range(count):
        now += numbers.expovariate(rate)
        made.append((round(now, 1), numbers.randrange(8, 900), numbers.randrange(1, 60)))
    return made


def azure(rows):
    lines = [f"2024-05-14 14:{int(t) // 60:02}:{t % 60:09.6f}+00:00,{prompt},{answer}" for t, prompt, answer in rows]
    return "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n"


class Replay(Scratch):
    def write(self, name, text):
        with open(self.path(name), "w", encoding="utf-8") as file:
            file.write(text)
        return self.path(name)

    def setUp(self):
        super().setUp()
        self.table = self.write("steps.json", json.dumps(table()))
        self.trace = self.write("azure.csv", azure(requests()))

    def report(self, trace, *flags):
        run("replay", trace, "--simulate", self.table, *flags, "--json", self.path("report.json"))
        with open(self.path("report.json"), encoding="utf-8") as file:
            return json.load(file)

    def test_all_formats_say_the_same(self):
        rows = requests()
        burst_gpt = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n" + "".join(
            f"{t},ChatGPT,{prompt},{answer},{prompt + answer},Conversation log\n" for t, prompt, answer in rows)
        mooncake = "".join(json.dumps({"timestamp": round(1000 * t), "input_length": prompt, "output_length": answer, "hash_ids": [1]}) + "\n"
                           for t, prompt, answer in rows)
        reports = [self.report(trace)["rows"] for trace in (
            self.trace, self.write("burst.csv", burst_gpt), self.write("mooncake.jsonl", mooncake))]
        self.assertEqual([row["policy"] for row in reports[0]], ["fp16", "threshold:1024", "slo-fp16", "slo-fp8", "slo"])
        for other in reports[1:]:
            for one, two in zip(reports[0], other):
                for name in ("attainment_tight", "attainment_loose", "fp16_token_share", "switches", "requests"):
                    self.assertAlmostEqual(one[name], two[name], places=9, msg=name)
                self.assertAlmostEqual(one["ttft_s"]["p90"], two["ttft_s"]["p90"], places=4)

    def test_policies_are_what_they_say(self):
        rows = {row["policy"]: row for row in self.report(self.trace, "--goodput", "ttft:400", "tpot:40")["rows"]}
        for policy, row in rows.items():
            self.assertEqual((row["requests"], row["failed"]), (120, 0), policy)
            self.assertLessEqual(row["attainment_tight"], row["attainment_loose"], policy)
        self.assertEqual(rows["fp16"]["fp16_token_share"], 1)
        self.assertEqual(rows["slo-fp8"]["fp16_token_share"], 0)
        self.assertGreaterEqual(rows["slo"]["attainment_tight"], rows["slo-fp16"]["attainment_tight"])
        self.assertGreater(rows["slo"]["fp16_token_share"], 0)
        self.assertEqual(sum(rows["slo"]["switch_reasons"].values()), rows["slo"]["switches"])
        self.assertGreater(rows["slo"]["steps"], rows["slo"]["fp8_steps"])

    def test_the_report_has_its_command_as_a_shell_takes_it(self):
        trace = self.write("two words, it's one.csv", azure(requests(count=5)))
        command = ["replay", trace, "--simulate", self.table, "--policies", "slo", "threshold:8"]
        self.assertEqual(shlex.split(self.report(trace, *command[4:])["command"]), ["nestedfp", *command])

    def test_the_same_command_gives_the_same_report(self):
        flags = ("--noise", "0.1", "--rate", "4", "--replicas", "2")
        self.assertEqual(self.report(self.trace, *flags), self.report(self.trace, *flags))

    def test_more_machines_are_not_slower(self):
        one, three = (self.report(self.trace, "--policies", "slo-fp16", "--rate", "6", "--replicas", n)["rows"][0] for n in ("1", "3"))
        self.assertGreaterEqual(three["attainment_tight"], one["attainment_tight"])
        self.assertLess(three["ttft_s"]["mean"], one["ttft_s"]["mean"])

    def test_machines_without_requests_take_no_memory(self):
        few, many = (self.report(self.trace, "--policies", "slo", "--replicas", n)["rows"] for n in ("120", "4096"))
        self.assertEqual(few, many)
        with_limit = ["sh", "-c", 'ulimit -v 2000000; exec "$@"', "sh", PROGRAM, "replay", self.trace, "--simulate", self.table,
                      "--policies", "slo", "--replicas", "4096"]
        self.assertEqual(subprocess.run(with_limit, capture_output=True, timeout=60).returncode, 0)

    def test_a_precision_that_the_table_lacks_is_told_before_anything_is_simulated(self):
        line = failure("replay", self.trace, "--simulate", self.table, "--policies", "slo", "fp8-w8a8", code=2)
        self.assertIn("--policies fp8-w8a8: the step times have no fp8-w8a8; measure it too", line)
        alone = table()
        alone["levels"], alone["steps"] = alone["levels"][:1], [step for step in alone["steps"] if step["level"] == 0]
        exact = self.write("exact.json", json.dumps(alone))
        for policy in ("fp8", "threshold:8"):
            self.assertIn(f"--policies {policy}: the step times have no fp8",
                          failure("replay", self.trace, "--simulate", exact, "--policies", policy, code=2))
        run("replay", self.trace, "--simulate", exact, "--policies", "fp16", "slo-fp16")

    def test_the_highest_rate_holds_and_more_does_not(self):
        out, _ = run("replay", self.trace, "--simulate", self.table, "--find-rate", "--attainment", "0.9", "--policies", "slo-fp16", "slo-fp8",
                     "--json", self.path("report.json"))
        with open(self.path("report.json"), encoding="utf-8") as file:
            found = {limit["policy"]: limit["rate"] for limit in json.load(file)["highest_rates"]}
        self.assertLess(found["slo-fp16"], found["slo-fp8"])
        self.assertIn("slo-fp16", out)
        for policy, rate in found.items():
            at, above = (self.report(self.trace, "--policies", policy, "--rate", str(r))["rows"][0]["attainment_tight"] for r in (rate, 1.5 * rate))
            self.assertGreaterEqual(at, 0.9)
            self.assertLess(above, 0.9)

    def test_no_rate_and_any_rate(self):
        found = ("replay", self.trace, "--simulate", self.table, "--find-rate", "--json", self.path("report.json"))
        out, _ = run(*found, "--policies", "slo-fp16", "slo-fp8", "--slowdown", "20", timeout=120)
        for policy in ("slo-fp16", "slo-fp8"):
            self.assertRegex(out, policy + r" +holds at no rate 95\.0 %")
        with open(self.path("report.json"), encoding="utf-8") as file:
            self.assertEqual([limit["rate"] for limit in json.load(file)["highest_rates"]], [0, 0])
        # Two requests are in time however soon the second comes; a rate far below the trace's keeps neither.
        for seconds in (1.0, 0.01):
            short = self.write("short.csv", azure([(0.0, 100, 5), (seconds, 100, 5)]))
            out, _ = run("replay", short, "--simulate", self.table, "--find-rate", "--policies", "fp16", timeout=120)
            self.assertGreater(float(out.split()[1]), 1e5, out)

    def test_flags_that_would_say_nothing_are_refused(self):
        simulated = ("replay", self.trace, "--simulate", self.table)
        over_http = ("replay", self.trace, "--url", "http://127.0.0.1:1")
        for words in ((*simulated, "--find-rate", "--rate", "2"), (*over_http, "--find-rate"), (*over_http, "--policies", "fp16"),
                      (*over_http, "--slo-missed", "shed")):
            self.assertIn("excludes", run(*words, code=2, timeout=60)[1])
        line = failure(*simulated, "--policies", "fp16", "slow", code=2)
        for name in ("--policies", "slow", "threshold:", "slo, slo-fp16, slo-fp8"):
            self.assertIn(name, line)

    def test_a_trace_that_a_list_took_is_told(self):
        said = failure("replay", "--policies", "slo", self.trace, "--simulate", self.table, code=2)
        self.assertIn(f"TRACE is required; --policies takes several values, also '{self.trace}': name the former before it", said)
        self.assertNotIn("several", failure("replay", "--policies", "slo", "--simulate", self.table, code=2))
        run("replay", "--simulate", self.table, "--policies", "slo", "--", self.trace)

    def test_flags_that_do_nothing_are_named(self):
        def idle(*words, code=0):
            return re.findall(r"warning (--[a-z0-9-]+): does nothing, as ", run("replay", self.trace, "--requests", "3", *words, code=code)[1])

        simulated = ("--simulate", self.table)
        self.assertEqual(idle("--url", "http://127.0.0.1:1", "--noise", "0.1", "--table-scale", "2", "--slo-factor", "3", code=1),
                         ["--noise", "--slo-factor", "--table-scale"])
        self.assertEqual(idle(*simulated, "--policies", "fp16", "--vocab", "500", "--exact-decode", "--attainment", "0.5"),
                         ["--vocab", "--exact-decode", "--attainment"])
        self.assertEqual(idle(*simulated, "--as-served", "--slo-factor", "3"), ["--slo-factor"])
        self.assertEqual(idle(*simulated, "--policies", "fp16", "--find-rate", "--csv", self.path("none.csv")), ["--csv"])
        self.assertEqual(idle(*simulated, "--as-served", "--send-targets", "--slo-factor", "3", "--noise", "0.1", "--exact-decode"), [])

    def test_each_rate_sends_prompts_that_the_server_has_not_had(self):
        prompts = []

        class Server(BaseHTTPRequestHandler):
            def do_POST(self):
                prompts.append(tuple(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]))
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b'data: {"choices": [{"index": 0, "text": "a"}]}\n\ndata: [DONE]\n\n')

            def log_message(self, *_):
                pass

        with HTTPServer(("127.0.0.1", 0), Server) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            rows = [(0.1 * i, 50, 1) for i in range(9)]
            run("replay", self.write("short.csv", azure(rows)), "--url", f"http://127.0.0.1:{server.server_port}", "--rate", "20", "40",
                "--requests", "3")
            server.shutdown()
        self.assertEqual(len(prompts), 6)
        self.assertEqual(len(set(prompts)), 6)

    def test_files_that_cannot_be_written_are_told_before_the_simulation(self):
        for flag in ("--json", "--csv", "--html"):
            out, err = run("replay", self.trace, "--simulate", self.table, flag, self.path("none/report"), code=1)
            self.assertEqual(out, "")
            self.assertRegex(err, "^nestedfp: error: .*none/report: cannot be written: ")
        failure("replay", self.trace, "--simulate", self.write("no.json", "{}"), "--json", self.path("left.json"))
        self.assertEqual([name for name in os.listdir(self.dir) if name.startswith("left")], [])

    def test_two_reports_are_two_files_however_they_are_named(self):
        simulated = ("replay", self.trace, "--simulate", self.table, "--policies", "fp16")
        for other in ("report", os.path.join(".", "report"), self.path("report")):
            said = failure(*simulated, "--json", "report", "--html", other, code=2, cwd=self.dir)
            self.assertIn(f"--html: {other} is what --json writes, too", said)
        self.assertFalse(os.path.exists(self.path("report")))

    def test_a_request_alone_has_the_steps_of_the_machine(self):
        # An engine's steps have room for a token of each of its sequences, whatever --max-num-batched-tokens is.
        few, many = (self.report(self.trace, "--policies", "fp16", "--max-num-seqs", "64", "--max-num-batched-tokens", tokens)["rows"]
                     for tokens in ("8", "64"))
        self.assertEqual(few, many)

    def test_levels_are_of_slo_alone(self):
        rows = {row["policy"]: row for row in self.report(self.trace, "--policies", "fp8", "slo", "slo-fp8", "--fp8-levels", "0.5", "--speed", "3")["rows"]}
        self.assertEqual((rows["fp8"]["fp8_weight_share"], rows["slo-fp8"]["fp8_weight_share"]), (1, 1))
        self.assertLess(rows["slo"]["fp8_weight_share"], 0.5)
        self.assertGreater(rows["slo"]["fp8_weight_share"], 0)
        rows = {row["policy"]: row for row in self.report(self.trace, "--fp8-levels", "0", "--speed", "3")["rows"]}
        self.assertEqual((rows["slo"]["fp8_weight_share"], rows["slo-fp8"]["fp8_weight_share"]), (0, 1))

    def test_reports(self):
        run("replay", self.trace, "--simulate", self.table, "--policies", "fp16", "slo", "--csv", self.path("r.csv"), "--html", self.path("r.html"))
        with open(self.path("r.csv"), encoding="utf-8", newline="") as file:
            lines = list(csv.DictReader(file))
        self.assertEqual(len(lines), 2 * 120)
        self.assertEqual({(line["priority"], line["precision"]) for line in lines}, {("0", "auto")})
        with open(self.path("r.html"), encoding="utf-8") as file:
            page = file.read()
        self.assertIn("<svg", page)
        self.assertEqual(re.findall(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page), [])  # it loads nothing
        self.assertIn("slo", page)

    def test_a_page_of_highest_rates_has_no_empty_table(self):
        run("replay", self.trace, "--simulate", self.table, "--find-rate", "--policies", "slo-fp8", "--html", self.path("r.html"))
        with open(self.path("r.html"), encoding="utf-8") as file:
            tables = re.findall("<table>.*?</table>", file.read())
        self.assertEqual(len(tables), 1)
        self.assertIn("<td>slo-fp8</td>", tables[0])

    def test_waits_by_priority(self):
        lines = azure(requests(rate=60.0)).splitlines()
        trace = self.write("kinds.csv", "\n".join([lines[0] + ",priority,precision"] + [
            f"{line},{-(i % 4 == 0)},{'exact' if i % 6 == 0 else ''}" for i, line in enumerate(lines[1:])]) + "\n")
        flags = (trace, "--simulate", self.table, "--policies", "fp16", "slo", "--html", self.path("r.html"), "--csv", self.path("r.csv"))
        out, _ = run("replay", *flags, "--json", self.path("r.json"))
        with open(self.path("r.json"), encoding="utf-8") as file:
            rows = json.load(file)["rows"]
        for row in rows:
            urgent, others = row["by_priority"]
            self.assertEqual([(kind["priority"], kind["requests"]) for kind in (urgent, others)], [(-1, 30), (0, 90)])
            self.assertLess(urgent["ttft_s"]["p90"], others["ttft_s"]["p90"])
            self.assertEqual([(kind["precision"], kind["requests"]) for kind in row["by_precision"]], [("auto", 100), ("exact", 20)])
        self.assertEqual(len(re.findall("^  priority -1: 30 requests, ", out, re.M)), 2)
        with open(self.path("r.csv"), encoding="utf-8", newline="") as file:
            exact = [line for line in csv.DictReader(file) if line["precision"] == "exact"]
        self.assertEqual({line["fp8_tokens"] for line in exact}, {"0"})
        with open(self.path("r.html"), encoding="utf-8") as file:
            page = file.read()
        self.assertIn("<h2>By priority</h2>", page)
        self.assertEqual(self.report(self.trace, "--policies", "fp16")["rows"][0]["by_priority"], [])
        for value in ("high", "1.5", "99999999999"):
            line = failure("replay", self.write("bad.csv", f"{lines[0]},priority\n{lines[1]},{value}\n"), "--simulate", self.table)
            self.assertIn("bad.csv: line 2: priority ", line)

    def test_a_table_of_another_model_is_refused(self):
        self.report(self.trace, "--table-model", "m", "--table-engine", "d")
        for flag in ("--table-model", "--table-engine"):
            said = failure("replay", self.trace, "--simulate", self.table, flag, "another", code=2)
            self.assertIn("steps.json: is of ", said)
            self.assertIn("'another'", said)

    def test_what_is_wrong_is_named(self):
        rows = requests(5)
        self.report(self.write("unsorted.csv", azure(rows[::-1])))  # put in order
        for name, text, said in (
                ("negative.csv", azure([(1.0, -5, 3)]), "line 2"), ("nan.csv", azure(rows).replace(f",{rows[2][1]},", ",nan,"), "line 4"),
                ("huge.csv", azure([(1.0, 10**12, 3)]), "line 2"), ("empty.csv", "", "empty.csv"), ("what.csv", "a,b\n1,2\n", "what.csv")):
            line = failure("replay", self.write(name, text), "--simulate", self.table)
            self.assertIn(name, line)
            self.assertIn(said, line)
        failure("replay", self.trace, "--simulate", self.write("no.json", "{}"))
        failure("replay", self.trace, code=2)  # neither --simulate nor --url


if __name__ == "__main__":
    main()
