"""The unmodified `openai` package against the server."""

import json

import openai
import pytest

TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Weather of a city",
          "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]


@pytest.fixture(scope="module")
def client(fake):
    return openai.OpenAI(base_url=fake.url + "/v1", api_key="none", max_retries=0)


def say(text):
    return [{"role": "user", "content": "SAY:" + text}]


def test_models(client):
    assert [m.id for m in client.models.list()] == ["fake", "fake/alias"]
    assert client.models.retrieve("fake/alias").id == "fake/alias"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_completion(client):
    r = client.completions.create(model="fake", prompt=["SAY:one", "SAY:two"], max_tokens=20, n=2, logprobs=2, echo=True)
    assert [c.text for c in r.choices] == ["SAY:oneone"] * 2 + ["SAY:twotwo"] * 2
    assert [c.index for c in r.choices] == [0, 1, 2, 3]
    assert len(r.choices[0].logprobs.tokens) == 7 + 4
    assert r.usage.prompt_tokens == 14 and r.usage.completion_tokens == 16
    assert client.completions.create(model="fake", prompt=[104, 105], max_tokens=3).choices[0].text == "abc"


def test_stop_strings(client):
    r = client.completions.create(model="fake", prompt="x", max_tokens=30, stop=["fg", "zz"])
    assert r.choices[0].text == "abcde" and r.choices[0].finish_reason == "stop"
    streamed = "".join(c.choices[0].text for c in client.completions.create(
        model="fake", prompt="x", max_tokens=30, stop="fg", stream=True))
    assert streamed == "abcde"


def test_chat(client):
    r = client.chat.completions.create(model="fake", messages=say("Grüße, 世界 😀"), logprobs=True, top_logprobs=1)
    assert r.choices[0].message.content == "Grüße, 世界 😀"
    joined = b"".join(bytes(t.bytes) for t in r.choices[0].logprobs.content[:-1])
    assert joined.decode() == "Grüße, 世界 😀"


def test_chat_streams_whole_characters(client):
    text = "Grüße, 世界 😀"
    pieces, usage = [], None
    for chunk in client.chat.completions.create(model="fake", messages=say(text), stream=True,
                                                stream_options={"include_usage": True}):
        if chunk.choices:
            pieces.append(chunk.choices[0].delta.content or "")
        usage = chunk.usage or usage
    assert "".join(pieces) == text and "\ufffd" not in "".join(pieces)
    assert usage.completion_tokens == len(text.encode()) + 1
    assert usage.model_extra["nestedfp"]["completion"] == {"fp16_tokens": usage.completion_tokens, "fp8_tokens": 0}


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls(client, stream):
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
    r = client.chat.completions.create(model="fake", messages=say("Looking." + call + call), tools=TOOLS, stream=stream)
    if not stream:
        message = r.choices[0].message
        assert r.choices[0].finish_reason == "tool_calls" and message.content == "Looking."
        calls = [(c.function.name, c.function.arguments, c.id) for c in message.tool_calls]
    else:
        parts, content = {}, ""
        for chunk in r:
            content += chunk.choices[0].delta.content or ""
            for c in chunk.choices[0].delta.tool_calls or []:
                part = parts.setdefault(c.index, ["", "", ""])
                part[0] += c.function.name or ""
                part[1] += c.function.arguments or ""
                part[2] += c.id or ""
        assert content == "Looking."
        calls = [tuple(parts[i]) for i in sorted(parts)]
    assert [c[0] for c in calls] == ["weather"] * 2
    assert all(json.loads(c[1]) == {"city": "Paris"} for c in calls)
    assert calls[0][2] != calls[1][2]


def test_tool_results_go_back(client):
    r = client.chat.completions.create(model="fake", tools=TOOLS, messages=[
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function",
                                              "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "SAY:sunny"}])
    assert r.choices[0].message.content == "sunny"


def grammars(client):
    return client.models.list().data[0].model_extra["grammars"]


def test_structured_outputs(client):
    if not grammars(client):
        with pytest.raises(openai.BadRequestError, match="xgrammar"):
            client.chat.completions.create(model="fake", messages=say("x"), response_format={"type": "json_object"})
        pytest.skip("built without xgrammar (scripts/build-xgrammar)")
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"], "additionalProperties": False}
    r = client.chat.completions.create(model="fake", messages=say("no JSON at all"), max_tokens=60, response_format={
        "type": "json_schema", "json_schema": {"name": "person", "schema": schema}})
    assert isinstance(json.loads(r.choices[0].message.content)["age"], int)
    for extra in ({"guided_choice": ["red", "blue"]}, {"structured_outputs": {"choice": ["red", "blue"]}}):
        r = client.chat.completions.create(model="fake", messages=say("green"), extra_body=extra)
        assert r.choices[0].message.content in ("red", "blue")
    with pytest.raises(openai.BadRequestError, match="guided_regex"):
        client.chat.completions.create(model="fake", messages=say("x"), extra_body={"guided_regex": "(["})
    r = client.chat.completions.create(model="fake", messages=say("x"), tools=TOOLS, tool_choice="required", max_tokens=90)
    assert r.choices[0].message.tool_calls[0].function.name == "weather"


def test_precision(client):
    def counts(**extra):
        r = client.completions.create(model="fake", prompt="x", max_tokens=4, **extra)
        return r.usage.model_extra["nestedfp"]["completion"]
    assert counts(extra_body={"precision": "fast"}) == {"fp16_tokens": 0, "fp8_tokens": 4}
    assert counts(extra_headers={"X-NestedFP-Precision": "fast"}) == {"fp16_tokens": 0, "fp8_tokens": 4}
    assert counts(extra_body={"precision": "exact"}) == {"fp16_tokens": 4, "fp8_tokens": 0}


def test_errors_are_the_clients_own(client, launch):
    with pytest.raises(openai.NotFoundError) as e:
        client.completions.create(model="other", prompt="x")
    assert e.value.code == "model_not_found" and e.value.param == "model"
    with pytest.raises(openai.BadRequestError) as e:
        client.completions.create(model="fake", prompt="x", suffix="y")
    assert e.value.param == "suffix"
    with pytest.raises(openai.BadRequestError) as e:
        client.completions.create(model="fake", prompt="x", max_tokens=10**6)
    assert e.value.code == "context_length_exceeded"
    locked = launch("--api-key", "right", "--api-key", "other")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=locked.url + "/v1", api_key="wrong", max_retries=0).models.list()
    assert openai.OpenAI(base_url=locked.url + "/v1", api_key="other", max_retries=0).models.list().data


def test_full_queue_is_a_rate_limit(launch):
    server = launch("--max-queue", 1, "--max-num-seqs", 1, "--step-us", 100000)
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    streams = []
    with pytest.raises(openai.RateLimitError) as e:
        for _ in range(8):
            streams.append(client.completions.create(model="fake", prompt="x", max_tokens=20, stream=True))
    assert e.value.response.headers["Retry-After"] == "1"
    assert "the queue is full: 1 of its 1 places are taken, and this request takes 1" in str(e.value)
    for stream in streams:
        stream.close()


def test_async_clients(fake):
    import asyncio

    async def run():
        async with openai.AsyncOpenAI(base_url=fake.url + "/v1", api_key="none") as c:
            async def one(i):
                stream = await c.chat.completions.create(model="fake", messages=say(f"number {i}"), stream=True)
                return "".join([x.choices[0].delta.content or "" async for x in stream])
            return await asyncio.gather(*(one(i) for i in range(100)))
    assert asyncio.run(run()) == [f"number {i}" for i in range(100)]
