"""nestedfp serve on the demo model."""

import concurrent.futures
import json
import os
import re
import subprocess

import httpx
import openai
import pytest

PROMPTS = ["The capital of France is", "Water boils at", "def fibonacci(n):", "Once upon a time", "The opposite of hot is",
           "1, 2, 3, 4,", "My favourite colour is", "In 1969, humans"]


@pytest.fixture(scope="module")
def client(real):
    return openai.OpenAI(base_url=real.url + "/v1", api_key="none", max_retries=0, timeout=300)


def complete(client, prompt, **more):
    return client.completions.create(model="demo", prompt=prompt, max_tokens=24, temperature=0, **more)


def test_answers(client):
    assert "Paris" in complete(client, "The capital of France is").choices[0].text
    # With targets that are kept however busy the machine is: FP8 is for those in danger.
    r = client.chat.completions.create(model="demo", temperature=0, max_tokens=40,
                                       messages=[{"role": "user", "content": "What is the capital of France?"}],
                                       extra_body={"slo_ttft_ms": 60_000, "slo_itl_ms": 20_000})
    assert "Paris" in r.choices[0].message.content
    assert r.usage.model_extra["nestedfp"]["completion"]["fp8_tokens"] == 0


def test_together_as_alone(client):
    exact = {"extra_body": {"precision": "exact"}}
    alone = [complete(client, p, **exact).choices[0].text for p in PROMPTS]
    with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = list(pool.map(lambda p: complete(client, p, **exact).choices[0].text, PROMPTS))
    batch = [c.text for c in complete(client, PROMPTS, **exact).choices]
    assert together == alone and batch == alone


def test_exact_beside_fast(client):
    exact = complete(client, PROMPTS[0], extra_body={"precision": "exact"})
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        fast = [pool.submit(complete, client, p, extra_body={"precision": "fast"}) for p in PROMPTS]
        again = complete(client, PROMPTS[0], extra_body={"precision": "exact"})
        fast = [f.result() for f in fast]
    assert again.choices[0].text == exact.choices[0].text
    assert again.usage.model_extra["nestedfp"]["completion"]["fp8_tokens"] == 0
    assert sum(f.usage.model_extra["nestedfp"]["completion"]["fp8_tokens"] for f in fast) > 0


def test_seeds_repeat(client):
    def one(seed):
        return complete(client, "A poem:", seed=seed, extra_body={"precision": "exact"}).choices[0].text
    sampled = [client.completions.create(model="demo", prompt="A poem:", max_tokens=24, temperature=1, seed=7,
                                         extra_body={"precision": "exact"}).choices[0].text for _ in range(2)]
    assert sampled[0] == sampled[1]
    assert one(1) == one(2)  # greedy: seeds do not matter


def test_prompt_scores_do_not_depend_on_the_batch(real):
    def scores(prompt):
        r = httpx.post(real.url + "/v1/completions", timeout=300, json={
            "prompt": prompt, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1, "precision": "exact"})
        return [c["logprobs"]["token_logprobs"][:-1] for c in r.json()["choices"]]
    assert [scores(p)[0] for p in PROMPTS] == scores(PROMPTS)


def test_allowed_tokens_and_bad_words(client, real):
    def ids(**fields):
        r = complete(client, "The capital of France is", extra_body={"precision": "exact", "return_token_ids": True, **fields})
        return r.choices[0].text, r.choices[0].model_extra["token_ids"]
    text, free = ids()
    assert "Paris" in text
    for words in (["Paris"], ["  Paris"], [text[:text.index("Paris") + 5]]):
        without, found = ids(bad_words=words)
        assert "Paris" not in without.split(".")[0] and found != free, (words, without)
    some = sorted(set(free))[::2]
    assert set(ids(allowed_token_ids=some, ignore_eos=True)[1]) <= set(some)
    # Beside others that have no lists, and in FP8.
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        others = [pool.submit(complete, client, p) for p in PROMPTS]
        fast = [pool.submit(ids, allowed_token_ids=some, ignore_eos=True, precision="fast", temperature=1) for _ in range(4)]
        assert all(set(f.result()[1]) <= set(some) for f in fast) and all(o.result().choices[0].text for o in others)


def test_structured_output(client):
    if not client.models.list().data[0].model_extra["grammars"]:
        pytest.skip("built without xgrammar (scripts/build-xgrammar)")
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}, "population": {"type": "integer", "minimum": 0, "maximum": 99999999}},
              "required": ["city", "population"], "additionalProperties": False}
    for stream in (False, True):
        r = client.chat.completions.create(model="demo", max_tokens=100, temperature=0, stream=stream, messages=[
            {"role": "user", "content": "Name a city and its population."}],
            response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}})
        text = r.choices[0].message.content if not stream else "".join(c.choices[0].delta.content or "" for c in r)
        assert set(json.loads(text)) == {"city", "population"}, text


def test_grammars_and_seeds_under_preemption(launch_real, step_times):
    """Where the cache is too small for all and the precision changes at every step, each answer is still the one that its seed
    gives alone."""
    server = launch_real("--step-times", step_times, "--max-model-len", 300, "--kv-cache-memory", "8MB", "--precision-policy", "alternate:1",
                         "--grammar-compile-timeout", 200)
    schema = {"type": "object", "properties": {"name": {"type": "string", "minLength": 30, "maxLength": 90}, "old": {"type": "boolean"}},
              "required": ["name", "old"], "additionalProperties": False}
    kinds = [{}, {"repetition_penalty": 1.3, "min_tokens": 50}]
    if httpx.get(server.url + "/v1/models").json()["data"][0]["grammars"]:
        kinds += [{"guided_json": schema}, {"guided_regex": "([a-z]{2,9} ){8,30}end", "ignore_eos": True, "frequency_penalty": 1.0}]

    def answer(i, **more):
        return httpx.post(server.url + "/v1/completions", timeout=300, json={
            "prompt": PROMPTS[i % len(PROMPTS)] * 4, "max_tokens": 70, "temperature": 1, "seed": i, "logprobs": 2, "precision": "exact", "return_token_ids": True,
            **kinds[i % len(kinds)], **more}).json()["choices"][0]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for _ in range(5):  # a quick machine may be done with some before others come
            together = list(pool.map(answer, range(8)))
            if server.metric("vllm:num_preemptions_total") > 0:
                break
    assert server.metric("vllm:num_preemptions_total") > 0
    for i, choice in enumerate(together):
        assert choice == answer(i, cache_salt=str(i)), kinds[i % len(kinds)]  # nothing of it is cached
        if choice["finish_reason"] == "stop" and "guided_json" in kinds[i % len(kinds)]:
            assert set(json.loads(choice["text"])) == {"name", "old"}
        if choice["finish_reason"] == "stop" and "guided_regex" in kinds[i % len(kinds)]:
            assert re.fullmatch(kinds[i % len(kinds)]["guided_regex"], choice["text"])
    assert server.metric("vllm:kv_cache_usage_perc") == 0


def test_a_burst_makes_it_switch(launch_real, step_times, tmp_path):
    """What docs/slo.md shows a new user: a burst, played by replay against a server that decides by deadlines. Each request names
    its targets, which follow from what this machine needs: the same load is nothing to a GPU and too much for two cores."""
    server = launch_real("--step-times", step_times, "--fp8-levels", "0,1", "--kv-cache-memory", "256MB")
    burst = os.path.join(os.path.dirname(__file__), "../../bench/serve/burst.csv")
    report = tmp_path / "report.json"

    def play(scale):
        """The burst, with 5 times so many times what the table says of each request alone as its targets."""
        said = subprocess.run([os.environ["NFP_PROGRAM"], "replay", burst, "--url", server.url, "--model", "demo", "--speed", "200",
                               "--requests", "8", "--max-tokens", "150", "--json", report, "--simulate", step_times, "--send-targets",
                               "--table-scale", str(scale)], check=True, timeout=300, stdout=subprocess.PIPE, text=True).stdout
        row = json.loads(report.read_text())["rows"][0]
        assert row["failed"] == 0
        # The report tells of changes too: all until the last of its requests had ended.
        assert sum(row["switch_reasons"].values()) == row["switches"]
        assert row["steps"] is row["fp8_steps"] is row["preemptions"] is None  # of which a server does not tell replay
        assert (row["switches"] > 0) == ("precision changed" in said)
        return row

    easy = play(1000)  # 45 s a token
    assert easy["fp16_token_share"] == 1 and easy["switches"] == 0
    # Then less than what FP16 just took; by the table FP8 needs 0.6 of it.
    rows = []
    for share in (0.9, 0.7, 0.5, 0.3, 0.1):
        rows.append(play(max(0.001, share * easy["tpot_s"]["p50"] / (5 * 0.009))))
        if rows[-1]["switches"] > 0:
            break
    assert rows[-1]["switches"] > 0 and 0 <= rows[-1]["fp16_token_share"] < 1, rows
    # And it goes back. With ten minutes for each token no machine is too slow: whatever the burst taught the policy about this
    # one, nothing but less FP8 is left to want.
    alone = httpx.post(server.url + "/v1/completions", timeout=300, json={
        "model": "demo", "prompt": "Once", "max_tokens": 4, "slo_ttft_ms": 600_000, "slo_itl_ms": 600_000}).json()
    assert alone["usage"]["nestedfp"]["completion"]["fp8_tokens"] == 0
    reasons = dict(re.findall(r'^nestedfp:level_changes_total\{[^\n]*reason="(\w+)"[^\n]* (\S+)$', server.metrics(), re.M))
    assert float(reasons["room"]) >= 1, reasons
