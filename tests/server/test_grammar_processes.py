"""Grammars run in processes of their own: what a client sees when these are killed."""

import json
import os
import signal
import threading
import time

import httpx
import pytest


def below(pid):
    """All processes that `pid` has forked, and those that these have."""
    parents = {}
    for name in os.listdir("/proc"):
        try:
            with open(f"/proc/{name}/stat", encoding="ascii", errors="replace") as f:
                parents[int(name)] = int(f.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            pass
    found = [pid]
    for at in found:
        found += [child for child, parent in parents.items() if parent == at and child not in found]
    return found[1:]


def lives(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as f:
            return f.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill_all(server):
    """Parents first: an answer's process that ends before its grammar's is taken for one that could not go on."""
    for pid in below(server.process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
            while lives(pid):
                time.sleep(0.001)
        except ProcessLookupError:
            pass


def guided(server, regex, **more):
    return httpx.post(server.url + "/v1/completions", json={"prompt": "x", "guided_regex": regex, "max_tokens": 5, **more},
                      timeout=60)


@pytest.fixture(scope="module")
def server(launch):
    server = launch("--step-us", 5000)
    if not httpx.get(server.url + "/v1/models").json()["data"][0].get("grammars"):
        pytest.skip("built without xgrammar (scripts/build-xgrammar)")
    return server


def test_answers_under_way_end_with_an_error_and_later_ones_work(server):
    assert guided(server, "a{5}").status_code == 200
    plain, whole, events = {}, {}, []

    def ask_plain():
        plain["r"] = httpx.post(server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 300}, timeout=60)

    def ask_whole():
        whole["r"] = guided(server, "[ab]{2000}", max_tokens=2000)
    threads = [threading.Thread(target=ask_plain), threading.Thread(target=ask_whole)]
    for t in threads:
        t.start()
    with httpx.stream("POST", server.url + "/v1/completions", timeout=60,
                      json={"prompt": "x", "guided_regex": "[cd]{2000}", "max_tokens": 2000, "stream": True}) as r:
        assert r.status_code == 200
        for line in r.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
                if len(events) == 20:
                    kill_all(server)
    for t in threads:
        t.join()
    said = "the process of the grammar in 'guided_regex' has ended; try again"
    assert 20 <= len(events) < 2000 and events[-1]["error"]["message"] == said
    assert whole["r"].status_code == 500 and whole["r"].json()["error"]["message"] == said
    assert plain["r"].status_code == 200 and len(plain["r"].json()["choices"][0]["text"]) == 300
    # Those that were compiled before are compiled again, others too.
    assert guided(server, "a{5}").json()["choices"][0]["text"] == "aaaaa"
    assert guided(server, "y{5}").json()["choices"][0]["text"] == "yyyyy"
    assert server.metric("nestedfp:grammar_process_restarts_total") >= 1
    server.wait_idle()
    assert server.metric("nestedfp:grammars_compiling") == 0


def test_nothing_is_left_when_the_server_is_killed(launch):
    server = launch()
    if not httpx.get(server.url + "/v1/models").json()["data"][0].get("grammars"):
        pytest.skip("built without xgrammar (scripts/build-xgrammar)")
    assert guided(server, "[ab]{5}").status_code == 200
    left = below(server.process.pid)
    assert left
    server.process.kill()
    server.process.wait()
    server.process.returncode = 0  # as was asked for
    end = time.time() + 10
    while any(lives(pid) for pid in left) and time.time() < end:
        time.sleep(0.05)
    assert not [pid for pid in left if lives(pid)]
