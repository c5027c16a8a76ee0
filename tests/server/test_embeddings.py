"""/v1/embeddings: by the unmodified `openai` package, and by hand. The fake model's hidden state of a token is the token,
its position, 1, and zeros."""

import base64
import concurrent.futures
import json
import math
import struct

import httpx
import openai
import pytest


@pytest.fixture(scope="module")
def client(fake):
    return openai.OpenAI(base_url=fake.url + "/v1", api_key="none", max_retries=0)


def post(server, **body):
    return httpx.post(server.url + "/v1/embeddings", json=body, timeout=300)


def vectors(server, **body):
    r = post(server, **body)
    assert r.status_code == 200, r.text
    return [d["embedding"] for d in r.json()["data"]]


def unit(values):
    length = math.sqrt(sum(v * v for v in values))
    return [v / length for v in values]


def near(a, b, tolerance=1e-6):
    return len(a) == len(b) and all(abs(x - y) <= tolerance for x, y in zip(a, b))


def test_by_the_openai_package(client):
    r = client.embeddings.create(model="fake", input="abc")  # the package asks for base64 and decodes it
    assert r.object == "list" and r.model == "fake" and r.data[0].index == 0 and r.data[0].object == "embedding"
    assert near(r.data[0].embedding, unit([ord("c"), 2, 1] + 5 * [0]))
    assert r.usage.prompt_tokens == r.usage.total_tokens == 3
    assert r.usage.model_extra["nestedfp"]["prompt"] == {"fp16_tokens": 3, "fp8_tokens": 0}
    many = client.embeddings.create(model="fake", input=["a", "bb", "ccc"], encoding_format="float")
    assert [d.index for d in many.data] == [0, 1, 2] and many.usage.prompt_tokens == 6
    assert near(many.data[2].embedding, unit([ord("c"), 2, 1] + 5 * [0]))
    ids = client.embeddings.create(model="fake", input=[[97], [98, 98], [99, 99, 99]])
    assert all(near(a.embedding, b.embedding) for a, b in zip(ids.data, many.data))
    assert near(client.embeddings.create(model="fake", input=[98, 98]).data[0].embedding, many.data[1].embedding)
    short = client.embeddings.create(model="fake", input="abc", dimensions=2).data[0].embedding
    assert near(short, unit([ord("c"), 2]))
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model="fake", input="abc", dimensions=9)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="abc")


def test_pooling_and_normalisation(fake, launch):
    assert vectors(fake, input="abc", normalize=False) == [[99, 2, 1, 0, 0, 0, 0, 0]]
    assert vectors(fake, input="xyz" + "a" * 5000, truncate_prompt_tokens=3, truncation_side="right", normalize=False) == [[122, 2, 1, 0, 0, 0, 0, 0]]
    assert vectors(fake, input="abc", normalize=False, pooling="mean") == [[98, 1, 1, 0, 0, 0, 0, 0]]
    assert near(vectors(fake, input="abc", pooling="mean")[0], unit([98, 1, 1] + 5 * [0]))
    mean = launch("--pooling", "mean")
    assert vectors(mean, input="abc", normalize=False) == [[98, 1, 1, 0, 0, 0, 0, 0]]
    assert vectors(mean, input="abc", normalize=False, pooling="last") == [[99, 2, 1, 0, 0, 0, 0, 0]]


def test_base64_is_the_same_numbers(fake):
    numbers = vectors(fake, input=["abc", "x"])
    coded = vectors(fake, input=["abc", "x"], encoding_format="base64")
    for a, b in zip(numbers, coded):
        raw = base64.b64decode(b, validate=True)
        assert near(a, struct.unpack(f"<{len(raw) // 4}f", raw), 1e-7) and len(raw) == 32


def test_conversations_are_written_by_the_template(fake):
    messages = [{"role": "user", "content": "hello"}]
    count = httpx.post(fake.url + "/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()["count"]
    r = post(fake, messages=messages, normalize=False).json()
    assert r["usage"]["prompt_tokens"] == count and r["data"][0]["embedding"][1] == count - 1
    longer = post(fake, messages=messages, add_generation_prompt=True).json()
    assert longer["usage"]["prompt_tokens"] > count
    assert post(fake, messages=messages, input="x").json()["error"]["param"] == "input"
    assert "'messages'" in post(fake).text
    long = post(fake, messages=[{"role": "user", "content": "x" * 5000}])
    error = long.json()["error"]
    assert (long.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
    assert "the text of 'messages' has 50" in error["message"] and "input" not in error["message"]


def test_contexts_and_truncation(fake):
    assert post(fake, input="x" * 4096).status_code == 200  # no room is needed for an answer
    r = post(fake, input=["a", "x" * 4097])
    assert r.status_code == 400 and r.json()["error"]["code"] == "context_length_exceeded" and "entry 1" in r.text
    assert vectors(fake, input="x" * 5000 + "abc", truncate_prompt_tokens=3, normalize=False) == [[99, 2, 1, 0, 0, 0, 0, 0]]
    assert post(fake, input="x" * 5000, truncate_prompt_tokens=-1).json()["usage"]["prompt_tokens"] == 4096
    assert post(fake, input="x", truncate_prompt_tokens=5000).json()["error"]["param"] == "truncate_prompt_tokens"


def test_fields_that_are_wrong_or_unknown(fake, launch):
    for body, param in (({}, "input"), ({"input": []}, "input"), ({"input": "x", "encoding_format": "bytes"}, "encoding_format"),
                        ({"input": "x", "pooling": "max"}, "pooling"), ({"input": "x", "dimensions": 0}, "dimensions"),
                        ({"input": [[5], [-1]]}, "input"), ({"input": [300000]}, "input"), ({"input": ["x"] * 2049}, "input"),
                        ({"input": "x", "priority": 0.5}, "priority"), ({"input": "x", "embed_dtype": "float16"}, "embed_dtype")):
        r = post(fake, **body)
        assert r.status_code == 400 and r.json()["error"]["param"] == param, (body, r.text)
    r = post(fake, input="x", inputs=1)
    assert r.status_code == 200 and r.headers["X-NestedFP-Ignored"] == "inputs"
    assert post(launch("--strict-requests"), input="x", inputs=1).status_code == 400


def test_a_model_without_a_head_makes_no_text(fake, launch):
    server = launch("--headless")
    assert vectors(server, input="abc") == vectors(fake, input="abc")
    messages = [{"role": "user", "content": "x"}]
    for path, body in (("completions", {"prompt": "x"}), ("completions", {"prompt": "x", "echo": True, "logprobs": 1, "max_tokens": 0}),
                       ("chat/completions", {"messages": messages}), ("responses", {"input": "x"}),
                       ("messages", {"messages": messages, "max_tokens": 1})):
        r = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60)
        assert r.status_code == 400 and "has no head" in r.json()["error"]["message"], (path, r.text)
        assert httpx.post(f"{fake.url}/v1/{path}", json={"max_tokens": 1, **body}, timeout=60).status_code == 200, path
    assert httpx.post(server.url + "/tokenize", json={"prompt": "x"}).json()["count"] == 1


def test_batches_larger_than_the_queue_and_beside_answers(launch):
    server = launch("--max-queue", 80, "--max-num-seqs", 8, "--step-us", 500)
    text = [("ab" * (i % 50)) + chr(97 + i % 26) for i in range(1000)]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        answer = pool.submit(httpx.post, server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 600}, timeout=300)
        while server.metric("vllm:num_requests_running") == 0:  # else the batches could fill the queue before it comes
            assert not answer.done(), answer.result().text
        batch = pool.submit(vectors, server, input=text, normalize=False, pooling="mean")
        last = pool.submit(vectors, server, input=text[:300], normalize=False)
        assert answer.result().json()["usage"]["completion_tokens"] == 600
        for t, v in zip(text, batch.result()):
            assert near(v[:3], [sum(t.encode()) / len(t), (len(t) - 1) / 2, 1], 1e-4), t
        assert [v[0] for v in last.result()] == [ord(t[-1]) for t in text[:300]]
    server.wait_idle()
    assert server.metric("vllm:kv_cache_usage_perc") == 0


def test_a_client_that_leaves_ends_its_batch(launch):
    server = launch("--step-us", 20000, "--max-num-seqs", 2)
    with server.connect() as s:
        body = json.dumps({"input": ["x" * 100] * 500}).encode()
        s.sendall(b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        while server.metric("vllm:num_requests_waiting") == 0:
            assert httpx.get(server.url + "/load").json() == {"server_load": 1} or server.metric("vllm:prompt_tokens_total") == 0
    server.wait_idle(5)
    assert httpx.get(server.url + "/load").json() == {"server_load": 0}
    assert server.metric("vllm:prompt_tokens_total") < 500 * 100


def test_precision_prefixes_and_metrics(launch):
    server = launch("--precision-policy", "fp16", "--log-requests")
    before = server.metric("vllm:prompt_tokens_total")
    first = post(server, input="y" * 40, cache_salt="a").json()["usage"]
    again = post(server, input="y" * 40, cache_salt="a").json()["usage"]
    other = post(server, input="y" * 40, cache_salt="b").json()["usage"]
    assert [u["prompt_tokens_details"]["cached_tokens"] for u in (first, again, other)] == [0, 32, 0]
    assert first["nestedfp"]["slo_met"] is True
    assert server.metric("vllm:prompt_tokens_total") == before + 120
    assert server.metric("vllm:generation_tokens_total") == 0 and server.metric("vllm:time_to_first_token_seconds_count") == 0
    fast = launch("--precision-policy", "alternate:1")
    r = httpx.post(fast.url + "/v1/embeddings", json={"input": ["a"] * 5}, headers={"X-NestedFP-Precision": "exact"}).json()
    assert r["usage"]["nestedfp"]["prompt"] == {"fp16_tokens": 5, "fp8_tokens": 0}
    line = next(one for one in server.output().splitlines() if "endpoint=embeddings" in one)
    assert "outcome=ok " in line and "prompt_tokens=40" in line and "yyy" not in server.output()


# --- the demo model

SENTENCES = ["A cat sleeps on the sofa.", "A kitten naps on the couch.", "The stock market fell sharply on Monday."]


def test_of_a_real_model(real):
    alone = [vectors(real, input=s, precision="exact")[0] for s in SENTENCES]
    assert vectors(real, input=SENTENCES, precision="exact") == alone  # whoever shares the batch
    assert len(alone[0]) == 576 and all(abs(sum(v * v for v in a) - 1) < 1e-5 for a in alone)
    assert near(unit(alone[0][:64]), vectors(real, input=SENTENCES[0], dimensions=64, precision="exact")[0], 1e-6)

    def similarity(a, b):
        return sum(x * y for x, y in zip(a, b))
    mean = vectors(real, input=SENTENCES, pooling="mean", precision="exact")
    assert similarity(mean[0], mean[1]) > similarity(mean[0], mean[2])
    # FP8 is near, and not the same.
    fast = vectors(real, input=SENTENCES, pooling="mean", precision="fast")
    assert fast != mean and all(similarity(a, b) > 0.98 for a, b in zip(mean, fast))


def test_a_real_model_cuts_long_inputs_into_steps(launch_real):
    text = "The quick brown fox jumps over the lazy dog. " * 40
    answers = []
    for tokens in (64, 2048):
        server = launch_real("--max-num-seqs", 4, "--max-model-len", 2048, "--kv-cache-memory", "128MB",
                             "--max-num-batched-tokens", tokens, "--precision", "fp16")
        answers.append([vectors(server, input=[text, "short"], pooling=p) for p in ("last", "mean")])
        server.stop()
    assert answers[0] == answers[1]
