"""The unmodified packages openai (Responses API), openai-agents and anthropic against the server."""

import importlib.util
import json
import time

import httpx
import openai
import pytest

TOOL = {"type": "function", "name": "weather", "description": "Weather of a city", "strict": True,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
                       "additionalProperties": False}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


@pytest.fixture(scope="module")
def client(fake):
    return openai.OpenAI(base_url=fake.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def claude(fake):
    anthropic = pytest.importorskip("anthropic")
    return anthropic.Anthropic(base_url=fake.url, api_key="none", max_retries=0)


# --- OpenAI's Responses API


def test_response(client):
    r = client.responses.create(model="fake", input="SAY:hello", instructions="Be brief.", metadata={"a": "b"},
                                max_output_tokens=20, temperature=0.5)
    assert r.output_text == "hello" and r.status == "completed" and r.object == "response"
    assert r.instructions == "Be brief." and r.metadata == {"a": "b"} and r.temperature == 0.5 and r.max_output_tokens == 20
    assert r.usage.output_tokens == 6 and r.usage.total_tokens == r.usage.input_tokens + 6
    assert r.usage.model_extra["nestedfp"]["completion"]["fp16_tokens"] == 6
    cut = client.responses.create(model="fake", input="x", max_output_tokens=3)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens" and cut.output_text == "abc"
    scored = client.responses.create(model="fake", input="SAY:hi", top_logprobs=2, include=["message.output_text.logprobs"])
    entries = scored.output[0].content[0].logprobs
    assert [e.token for e in entries][:2] == ["h", "i"] and len(entries[0].top_logprobs) == 2


def test_input_tokens_are_counted(client, fake):
    """As many as the response's prompt has, with all that shapes it."""
    count = client.responses.input_tokens.count
    first = client.responses.create(model="fake", input="SAY:hello")
    forced = {"type": "function", "name": "weather"}
    for asked in ({"input": "SAY:hi"}, {"input": "SAY:hi", "instructions": "Be brief."}, {"input": "SAY:hi", "tools": [TOOL]},
                  {"input": "SAY:hi", "tools": [TOOL], "tool_choice": "none"}, {"input": "SAY:hi", "tools": [TOOL], "tool_choice": forced},
                  {"input": "SAY:" + "hi " * 9000, "truncation": "disabled", "text": {"format": {"type": "text"}}},
                  {"input": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "SAY:c"}]},
                  {"input": "SAY:hi", "previous_response_id": first.id}, {"previous_response_id": first.id},
                  {"input": "SAY:" + "hi " * 90, "extra_body": {"truncate_prompt_tokens": 70}}):
        counted = count(model="fake", **asked)
        assert counted.object == "response.input_tokens"
        if len(asked["input"]) < 9000 if "input" in asked else True:
            r = client.responses.create(model="fake", max_output_tokens=50, **asked)
            assert counted.input_tokens == r.usage.input_tokens, asked
        else:  # more than the context holds
            assert counted.input_tokens > 27000
    for wrong, param in (({}, "input"), ({"input": []}, "input"), ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
                         ({"input": "x", "conversation": "c"}, "conversation"), ({"previous_response_id": "resp_x"}, "previous_response_id")):
        with pytest.raises(openai.BadRequestError) as e:
            count(**wrong)
        assert e.value.param == param and f"'{param}'" in e.value.message or param == "previous_response_id"
    with pytest.raises(openai.NotFoundError, match="'other' does not exist here"):
        count(model="other", input="x")
    r = httpx.post(fake.url + "/v1/responses/input_tokens", json={"input": "x", "personality": "friendly", "reasoning": {"effort": "low"}})
    assert r.status_code == 200 and set(r.headers["X-NestedFP-Ignored"].split(", ")) == {"personality", "reasoning.effort"}
    assert httpx.post(fake.url + "/v1/responses/input_tokens/", json={"input": "x"}).json() == r.json()


def test_response_events(client):
    seen, text, final = [], "", None
    with client.responses.stream(model="fake", input="SAY:Grüße 😀") as stream:
        for event in stream:
            seen.append(event.type)
            if event.type == "response.output_text.delta":
                text += event.delta
        final = stream.get_final_response()
    assert text == "Grüße 😀" == final.output_text
    assert seen[:4] == ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    assert seen[-4:] == ["response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed"]
    numbers = [e.sequence_number for e in client.responses.create(model="fake", input="SAY:x", stream=True)]
    assert numbers == list(range(len(numbers)))
    last = list(client.responses.create(model="fake", input="x", max_output_tokens=2, stream=True))[-1]
    assert last.type == "response.incomplete" and last.response.output_text == "ab"
    assert last.response.output[0].status == "incomplete"
    assert client.responses.retrieve(final.id).output_text == "Grüße 😀"


@pytest.mark.parametrize("stream", [False, True])
def test_response_calls_tools(client, stream):
    arguments = {"model": "fake", "input": "SAY:Looking." + CALL + CALL, "tools": [TOOL]}
    if stream:
        events = list(client.responses.create(stream=True, **arguments))
        pieces = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
        done = [e.arguments for e in events if e.type == "response.function_call_arguments.done"]
        assert pieces == "".join(done)
        r = events[-1].response
    else:
        r = client.responses.create(**arguments)
    assert [o.type for o in r.output] == ["message", "function_call", "function_call"]
    assert r.output_text == "Looking." and json.loads(r.output[1].arguments) == {"city": "Paris"}
    assert r.output[1].call_id != r.output[2].call_id and r.output[1].name == "weather"
    # The results, once with everything sent again and once by the answer's id.
    results = [{"type": "function_call_output", "call_id": o.call_id, "output": f"SAY:sunny {i}"}
               for i, o in enumerate(r.output[1:])]
    again = [{"role": "user", "content": arguments["input"]}, *(o.model_dump(exclude_none=True) for o in r.output), *results]
    assert client.responses.create(model="fake", tools=[TOOL], input=again).output_text == "sunny 1"
    by_id = client.responses.create(model="fake", tools=[TOOL], input=results, previous_response_id=r.id)
    assert by_id.output_text == "sunny 1" and by_id.previous_response_id == r.id
    whole = client.responses.create(model="fake", tools=[TOOL], input=again)
    assert by_id.usage.input_tokens == whole.usage.input_tokens


@pytest.mark.parametrize("said", ["Look. " + CALL + " And?", CALL + "So. " + CALL, "One." + CALL + "two" + CALL + "three."])
def test_a_response_goes_on_alike_by_its_id_and_by_its_items(client, said):
    first = {"role": "user", "content": "SAY:" + said}
    r = client.responses.create(model="fake", tools=[TOOL], input=[first])
    assert "function_call" in [i.type for i in r.output] and "message" in [i.type for i in r.output]
    results = [{"type": "function_call_output", "call_id": i.call_id, "output": "SAY:ok"} for i in r.output if i.type == "function_call"]
    by_id = client.responses.create(model="fake", tools=[TOOL], input=results, previous_response_id=r.id)
    by_items = client.responses.create(model="fake", tools=[TOOL], input=[first, *r.output, *results])
    assert by_id.usage.input_tokens == by_items.usage.input_tokens and by_items.output_text == "ok"
    assert by_items.usage.input_tokens_details.cached_tokens >= by_id.usage.input_tokens // 16 * 16 - 16


def test_calls_that_were_cut_off_come_back(client, launch):
    """As agents send them, with what came of them."""
    r = client.responses.create(model="fake", input="SAY:" + CALL, tools=[TOOL], max_output_tokens=60)
    cut = r.output[0]
    assert r.status == "incomplete" and cut.type == "function_call" and cut.arguments.startswith('{"city') and not cut.arguments.endswith("}")
    result = {"type": "function_call_output", "call_id": cut.call_id, "output": "SAY:no JSON"}
    more = [{"role": "user", "content": "x"}, cut.model_dump(exclude_none=True), result]
    again = client.responses.with_raw_response.create(model="fake", tools=[TOOL], input=more)
    assert again.parse().output_text == "no JSON" and again.headers["X-NestedFP-Ignored"] == "input[1].arguments"
    strict = openai.OpenAI(base_url=launch("--strict-requests").url + "/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match=r"input\[1\].arguments"):
        strict.responses.create(model="fake", tools=[TOOL], input=more)
    chat = {"model": "fake", "max_tokens": 60, "tools": [{"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}]}
    message = client.chat.completions.create(messages=[{"role": "user", "content": "SAY:" + CALL}], **chat).choices[0].message
    again = client.chat.completions.with_raw_response.create(**chat, messages=[
        {"role": "user", "content": "x"}, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "SAY:no JSON"}])
    assert again.parse().choices[0].message.content == "no JSON"
    assert again.headers["X-NestedFP-Ignored"] == "messages[1].tool_calls[0].function.arguments"


def test_a_call_that_a_stop_string_cut_says_so(client):
    """A response with it is complete, but the call is none to make; one that is whole is, whatever was cut behind it."""
    def calls(stop):
        request = {"model": "fake", "input": "SAY:" + CALL, "tools": [TOOL], "extra_body": {"stop": stop}}
        whole = client.responses.create(**request)
        events = list(client.responses.create(**request, stream=True))
        done = [e.item for e in events if e.type == "response.output_item.done"]
        assert whole.status == events[-1].response.status == "completed"
        return [(items[-1].type, items[-1].status, items[-1].arguments) for items in (whole.output, events[-1].response.output, done)]
    cut, = set(calls("Paris"))
    assert cut[:2] == ("function_call", "incomplete") and cut[2].startswith('{"city') and not cut[2].endswith("}")
    made, = set(calls("</tool_call>"))
    assert made[:2] == ("function_call", "completed") and json.loads(made[2])["city"] == "Paris"


def test_conversations_are_kept_and_bounded(client, fake, launch):
    def turns(c, text, previous=None, **more):
        return c.responses.create(model="fake", input=text, previous_response_id=previous, **more)
    first = turns(client, "SAY:one")
    second = turns(client, "again", first.id)
    assert second.output_text == "one"  # the fake model repeats what it finds
    # Instructions are of one response only.
    with_rules = turns(client, "x", instructions="SAY:rule")
    assert with_rules.output_text == "rule"
    assert turns(client, "y", with_rules.id, max_output_tokens=3).output_text == "abc"
    client.responses.delete(first.id)
    for wrong in (lambda: client.responses.retrieve(first.id), lambda: client.responses.delete(first.id)):
        with pytest.raises(openai.NotFoundError):
            wrong()
    with pytest.raises(openai.BadRequestError, match="events of a kept response"):  # not a stream without any
        client.responses.retrieve(second.id, stream=True)
    assert client.responses.retrieve(second.id).output_text == "one"
    with pytest.raises(openai.BadRequestError) as e:
        turns(client, "x", first.id)
    assert e.value.code == "previous_response_not_found" and e.value.param == "previous_response_id"
    unkept = turns(client, "SAY:x", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)
    # A long conversation goes through a worker.
    long = turns(client, "x" * 3000 + "SAY:long")
    for _ in range(2):
        assert turns(client, "more", long.id).output_text == "long"
    # Nobody finds another key's answers, and old ones make place for new ones.
    server = launch("--api-key", "one", "--api-key", "two", "--response-store-memory", 60000)
    one, two = (openai.OpenAI(base_url=server.url + "/v1", api_key=k, max_retries=0) for k in ("one", "two"))
    mine = turns(one, "SAY:mine")
    assert turns(one, "again", mine.id).output_text == "mine"
    for wrong in (lambda: two.responses.retrieve(mine.id), lambda: two.responses.delete(mine.id)):
        with pytest.raises(openai.NotFoundError):
            wrong()
    with pytest.raises(openai.BadRequestError):
        turns(two, "again", mine.id)
    for _ in range(40):
        last = turns(one, "SAY:" + "z" * 500)
    assert one.responses.retrieve(last.id).id == last.id
    with pytest.raises(openai.NotFoundError):
        one.responses.retrieve(mine.id)
    # An answer that is not kept does not say that it is.
    server = launch("--response-store-memory", 0)
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    unkept = turns(client, "SAY:x", store=True)
    assert unkept.store is False and mine.store is True
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


def test_what_led_to_a_kept_response(client, fake, launch):
    """As items: the input of all responses so far and the answers between them, not the response's own."""
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'}
    first = client.responses.create(model="fake", instructions="Be brief.", input=[
        {"role": "developer", "content": "rule"}, {"role": "user", "content": "weather?"},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]}, call,
        {"type": "function_call_output", "call_id": "c1", "output": "SAY:cold"}])
    second = client.responses.create(model="fake", input="again", previous_response_id=first.id)
    items = client.responses.input_items.list(second.id, order="asc")
    kinds = [item.type for item in items]
    assert kinds == ["message", "message", "reasoning", "function_call", "function_call_output", "message", "message"]
    said = [(i.role, i.content[0].type, i.content[0].text) for i in items if i.type == "message"]
    assert said == [("developer", "input_text", "rule"), ("user", "input_text", "weather?"), ("assistant", "output_text", "cold"),
                    ("user", "input_text", "again")]
    made = items.data[3]
    assert (made.call_id, made.name, made.arguments) == ("c1", "weather", call["arguments"]) and items.data[4].output == "SAY:cold"
    assert items.data[2].content[0].text == "Hm"
    ids = [item.id for item in items]
    assert len(set(ids)) == 7 and (items.first_id, items.last_id, items.has_more) == (ids[0], ids[-1], False)
    # The newest come first, page by page.
    page = client.responses.input_items.list(second.id, limit=3)
    assert page.has_more and [i.id for i in page.data] == ids[:3:-1] and [i.id for i in page] == ids[::-1]
    # A long conversation goes through a worker.
    thoughts = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "x" * 20000}]}
    long = client.responses.create(model="fake", input=[thoughts, {"role": "assistant", "content": "y"}, {"role": "user", "content": "SAY:ok"}])
    assert [i.type for i in client.responses.input_items.list(long.id)] == ["message", "message", "reasoning"]
    path = f"{fake.url}/v1/responses/{second.id}"
    for query, param in (("limit=0", "limit"), ("limit=101", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=msg_x", "after")):
        r = httpx.get(f"{path}/input_items?{query}")
        assert r.status_code == 400 and r.json()["error"]["param"] == param and f"'{param}'" in r.text
    # What is no response's id is not taken for one.
    for method, tail in (("GET", "/items"), ("GET", "/"), ("DELETE", "/input_items"), ("GET", "/x/input_items")):
        r = httpx.request(method, path + tail)
        assert r.status_code == 404 and "there is no such path" in r.text, tail
    assert httpx.get(path).status_code == 200
    r = httpx.get(fake.url + "/v1/responses/resp_x/input_items")
    assert r.status_code == 404 and "there is no response 'resp_x'" in r.text
    server = launch("--api-key", "one", "--api-key", "two")
    mine = httpx.post(server.url + "/v1/responses", json={"input": "x"}, headers={"Authorization": "Bearer one"}).json()["id"]
    assert [httpx.get(f"{server.url}/v1/responses/{mine}/input_items", headers={"Authorization": f"Bearer {k}"}).status_code
            for k in ("one", "two", "three")] == [200, 404, 401]


@pytest.mark.parametrize("more,param", [
    ({"input": []}, "input"), ({"input": [{"type": "computer_call"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "[]"}]}, "input[0].arguments"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"), ({"temperature": 7000.0}, "temperature"),
    ({"max_output_tokens": 0}, "max_output_tokens"), ({"background": True}, "background"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "strict": True, "schema": {"type": "array", "uniqueItems": True}}}},
     "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"), ({"text": {"format": {"type": None}}}, "text.format"),
    ({"text": {"format": {"type": "xml"}}}, "text.format"), ({"tool_choice": "required"}, "tool_choice"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort"), ({"conversation": "c"}, "conversation"),
])
def test_response_errors_name_the_field(fake, more, param):
    r = httpx.post(fake.url + "/v1/responses", json={"input": "x", **more})
    assert r.status_code == 400 and r.json()["error"]["param"] == param, r.text
    assert param.split("[")[0].split(".")[0] in r.json()["error"]["message"]


@pytest.mark.parametrize("path,body,param", [
    ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}}}, "text.format.schema"),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5,
                      "output_config": {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}}, "output_config.format.schema"),
])
def test_errors_of_the_grammars_compiler_name_the_field(fake, client, path, body, param):
    if not client.models.list().data[0].model_extra["grammars"]:
        pytest.skip("built without xgrammar (scripts/build-xgrammar)")
    r = httpx.post(fake.url + path, json={"model": "fake", **body})
    assert r.status_code == 400 and r.json()["error"]["message"].startswith(f"'{param}' cannot be compiled: Unsupported type"), r.text


def test_response_structured_output(client):
    if not client.models.list().data[0].model_extra["grammars"]:
        pytest.skip("built without xgrammar (scripts/build-xgrammar)")
    from pydantic import BaseModel

    class Person(BaseModel):
        age: int
    r = client.responses.parse(model="fake", input="no JSON", text_format=Person, max_output_tokens=60)
    assert isinstance(r.output_parsed.age, int)
    r = client.responses.create(model="fake", input="x", tools=[TOOL], tool_choice="required", max_output_tokens=90)
    assert r.output[0].type == "function_call" and r.output[0].name == "weather"
    chosen = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    r = client.responses.create(model="fake", input="x", tools=[TOOL, {**TOOL, "name": "other"}], tool_choice=chosen, max_output_tokens=90)
    assert r.output[0].name == "weather"


def test_a_failing_stream_ends_with_an_event(launch):
    server = launch("--step-us", 200000, "--drain-timeout-ms", 100)
    c = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    types = []
    with c.responses.create(model="fake", input="x", stream=True) as stream:
        for event in stream:
            types.append(event.type)
            if event.type == "response.output_text.delta" and types.count(event.type) == 1:
                server.process.terminate()
    assert types[0] == "response.created" and types[-2:] == ["error", "response.failed"]
    assert event.response.status == "failed" and "shutting down" in event.response.error.message


# As Vercel's AI SDK sends what it knows to be kept.
def test_references_to_items(client, launch):
    ask = {"role": "user", "content": f"SAY:one {CALL}"}
    first = client.responses.create(model="fake", input=[ask], tools=[TOOL], max_output_tokens=200)
    assert [item.type for item in first.output] == ["message", "function_call"]
    rest = [{"type": "function_call_output", "call_id": first.output[1].call_id, "output": "sunny"}, {"role": "user", "content": "SAY:two"}]
    refer = [ask, *({"type": "item_reference", "id": item.id} for item in first.output), *rest]
    whole = [ask, *(item.model_dump() for item in first.output), *rest]
    count = lambda items: client.responses.input_tokens.count(model="fake", input=items, tools=[TOOL]).input_tokens
    assert count(refer) == count(whole) > count([ask, *rest])
    second = client.responses.create(model="fake", input=refer, tools=[TOOL])
    assert second.output_text == "two"
    listed = [item.type for item in client.responses.input_items.list(second.id, order="asc")]
    assert listed == ["message", "message", "function_call", "function_call_output", "message"]
    # Of a stream, without its type, behind a response that goes on, and so large that a worker reads it.
    *_, last = client.responses.create(model="fake", input="SAY:" + "x" * 1000, max_output_tokens=1500, top_logprobs=5, stream=True)
    assert len(last.response.model_dump_json()) > 100_000
    third = client.responses.create(model="fake", previous_response_id=second.id, input=[{"id": last.response.output[0].id}, rest[1]])
    assert third.output_text == "two"
    assert "x" * 1000 in json.dumps([item.model_dump() for item in client.responses.input_items.list(third.id)])
    gone = client.responses.create(model="fake", input="SAY:x", store=False).output[0].id
    item = second.output[0].id
    for bad, status, words in (([gone], 404, f"Item with id '{gone}' not found"), ([item[:-1] + "7"], 404, "not found"), (["msg_"], 404, "not found"),
                               ([""], 404, "not found"), ([item, item], 400, "is that of an item before"), ([5], 400, "must be a string")):
        with pytest.raises(openai.APIStatusError, match=words) as refused:
            client.responses.create(model="fake", input=[ask, *({"type": "item_reference", "id": one} for one in bad)])
        assert refused.value.status_code == status and refused.value.param == f"input[{len(bad)}].id", bad
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="fake", input=[{"type": "item_reference", "id": item}])
    url = launch("--api-key", "one", "--api-key", "two").url + "/v1"
    one, two = (openai.OpenAI(base_url=url, api_key=key, max_retries=0) for key in ("one", "two"))
    item = one.responses.create(model="fake", input="SAY:x").output[0].id
    assert one.responses.create(model="fake", input=[{"type": "item_reference", "id": item}]).status
    with pytest.raises(openai.NotFoundError):
        two.responses.create(model="fake", input=[{"type": "item_reference", "id": item}])


# --- openai-agents


@pytest.mark.parametrize("streamed", [False, True])
def test_agents(fake, streamed):
    if importlib.util.find_spec("agents") is None:
        pytest.skip("openai-agents is not installed")
    import asyncio

    import agents
    agents.set_tracing_disabled(True)
    agents.set_default_openai_client(openai.AsyncOpenAI(base_url=fake.url + "/v1", api_key="none"), use_for_tracing=False)
    asked = []

    @agents.function_tool
    def weather(city: str) -> str:
        """Weather of a city."""
        asked.append(city)
        return f"SAY:It is sunny in {city}."

    agent = agents.Agent(name="helper", instructions="Help.", tools=[weather], model="fake")

    async def go():
        if not streamed:
            return (await agents.Runner.run(agent, "SAY:" + CALL)).final_output
        result, text = agents.Runner.run_streamed(agent, "SAY:" + CALL), ""
        async for event in result.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                text += event.data.delta
        assert text == result.final_output
        return result.final_output
    assert asyncio.run(go()) == "It is sunny in Paris." and asked == ["Paris"]


@pytest.mark.parametrize("api", ["responses", "chat"])
def test_agents_with_tools_whose_answer_has_a_schema(fake, client, api):
    """A call is no answer, and does not follow the answer's schema."""
    if importlib.util.find_spec("agents") is None:
        pytest.skip("openai-agents is not installed")
    if not client.models.list().data[0].model_extra["grammars"]:
        pytest.skip("built without xgrammar (scripts/build-xgrammar)")
    import asyncio

    import agents
    from pydantic import BaseModel
    agents.set_tracing_disabled(True)
    asked = []

    class Report(BaseModel):
        sky: str

    @agents.function_tool
    def weather(city: str) -> str:
        """Weather of a city."""
        asked.append(city)
        return 'SAY:{"sky": "blue"}'

    connection = openai.AsyncOpenAI(base_url=fake.url + "/v1", api_key="none")
    kind = agents.OpenAIResponsesModel if api == "responses" else agents.OpenAIChatCompletionsModel
    agent = agents.Agent(name="helper", tools=[weather], output_type=Report, model=kind("fake", connection))
    result = asyncio.run(agents.Runner.run(agent, "SAY:" + CALL))
    assert asked == ["Paris"] and result.final_output == Report(sky="blue")


# --- Anthropic's Messages API

CLAUDE_TOOL = {"name": "weather", "description": "Weather of a city", "input_schema": TOOL["parameters"]}


def test_message(claude):
    r = claude.messages.create(model="fake", max_tokens=20, system="Be brief.", messages=[{"role": "user", "content": "SAY:hello"}])
    assert r.content[0].text == "hello" and r.stop_reason == "end_turn" and r.type == "message" and r.role == "assistant"
    assert r.usage.output_tokens == 6 and r.usage.input_tokens + r.usage.cache_read_input_tokens > 30
    r = claude.messages.create(model="fake", max_tokens=3, messages=[{"role": "user", "content": "x"}])
    assert r.stop_reason == "max_tokens" and r.content[0].text == "abc"
    r = claude.messages.create(model="fake", max_tokens=30, stop_sequences=["fg"], messages=[{"role": "user", "content": "x"}])
    assert r.stop_reason == "stop_sequence" and r.stop_sequence == "fg" and r.content[0].text == "abcde"
    # The last message of the assistant is gone on with.
    r = claude.messages.create(model="fake", max_tokens=30, messages=[
        {"role": "user", "content": [{"type": "text", "text": "say it", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": "SAY:prefilled"}])
    assert r.content[0].text == "prefilled"


def test_message_stream(claude):
    with claude.messages.stream(model="fake", max_tokens=50, messages=[{"role": "user", "content": "SAY:Grüße 😀"}]) as stream:
        assert "".join(stream.text_stream) == "Grüße 😀"
        final = stream.get_final_message()
    assert final.content[0].text == "Grüße 😀" and final.stop_reason == "end_turn" and final.usage.output_tokens > 5
    assert "nestedfp" not in (final.usage.model_extra or {})  # the package would have that of the first token
    events = list(claude.messages.create(model="fake", max_tokens=50, stream=True, messages=[{"role": "user", "content": "SAY:x"}]))
    assert [e.type for e in events] == ["message_start", "content_block_start", "content_block_delta", "content_block_stop",
                                        "message_delta", "message_stop"]
    assert events[-2].usage.nestedfp["completion"]["fp16_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True])
def test_message_tools(claude, stream):
    first = {"role": "user", "content": "SAY:Looking." + CALL + CALL}
    arguments = {"model": "fake", "max_tokens": 300, "tools": [CLAUDE_TOOL]}
    if stream:
        with claude.messages.stream(messages=[first], **arguments) as s:
            r = s.get_final_message()
    else:
        r = claude.messages.create(messages=[first], **arguments)
    assert [b.type for b in r.content] == ["text", "tool_use", "tool_use"] and r.stop_reason == "tool_use"
    assert r.content[0].text == "Looking." and r.content[1].input == {"city": "Paris"} and r.content[1].id != r.content[2].id
    results = [{"type": "tool_result", "tool_use_id": b.id, "content": [{"type": "text", "text": f"SAY:sunny {i}"}]}
               for i, b in enumerate(r.content[1:])]
    r = claude.messages.create(messages=[first, {"role": "assistant", "content": r.content}, {"role": "user", "content": results}], **arguments)
    assert r.content[0].text == "sunny 1"


@pytest.mark.parametrize("cut", ["max_tokens", "stop_sequences"])
def test_a_cut_call_has_the_input_that_a_stream_tells(claude, cut):
    """What is whole of it, wherever it was cut, and a reason that makes it no call to make."""
    text = json.dumps({"name": "weather", "arguments": {"city": "Paris", "days": [1, {"from": "May", "to": -2.5e3}], "fast": True}})
    arguments = {"model": "fake", "tools": [CLAUDE_TOOL], "messages": [{"role": "user", "content": f"SAY:<tool_call>{text}</tool_call>"}]}
    begin = len("<tool_call>") + text.index('"city"')
    limits = [{"max_tokens": most} for most in range(begin, begin + len(text) - 45)] if cut == "max_tokens" else [
        {"max_tokens": 300, "stop_sequences": [stop]} for stop in ("Par", "days", "[1", '"to', '"fast')]
    seen = []
    for limit in limits:
        whole = claude.messages.create(**arguments, **limit)
        with claude.messages.stream(**arguments, **limit) as s:
            streamed = s.get_final_message()
        call, = whole.content
        assert call.type == "tool_use" and whole.stop_reason == streamed.stop_reason == cut.replace("sequences", "sequence")
        assert call.input == streamed.content[0].input, limit
        if call.input not in seen:
            seen.append(call.input)
    assert {} in seen and {"city": "Paris"} in seen and {"city": "Paris", "days": [1, {"from": "May"}]} in seen


def test_message_forced_tool(claude, fake):
    if not httpx.get(fake.url + "/v1/models").json()["data"][0]["grammars"]:
        pytest.skip("built without xgrammar (scripts/build-xgrammar)")
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}):
        r = claude.messages.create(model="fake", max_tokens=90, tools=[CLAUDE_TOOL], tool_choice=choice,
                                   messages=[{"role": "user", "content": "x"}])
        assert r.content[0].type == "tool_use" and r.content[0].name == "weather"


def test_tokens_are_counted(claude):
    messages = [{"role": "user", "content": "SAY:hello"}]
    count = claude.messages.count_tokens(model="fake", messages=messages, system="Be brief.", tools=[CLAUDE_TOOL]).input_tokens
    r = claude.messages.create(model="fake", messages=messages, system="Be brief.", tools=[CLAUDE_TOOL], max_tokens=5)
    assert count == r.usage.input_tokens + r.usage.cache_read_input_tokens


def test_context_management_that_takes_nothing_away(claude, fake):
    """As Claude Code sends it to any server."""
    anthropic = pytest.importorskip("anthropic")

    def ask(context):
        return claude.beta.messages.create(model="fake", max_tokens=5, messages=[{"role": "user", "content": "SAY:hi"}],
                                           context_management=context, betas=["context-management-2025-06-27"])
    for context in ({"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, {"edits": []}):
        assert ask(context).content[0].text == "hi"
    for edit in ({"type": "clear_tool_uses_20250919"}, {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}):
        with pytest.raises(anthropic.BadRequestError, match="context_management"):
            ask({"edits": [edit]})
    r = httpx.post(fake.url + "/v1/messages", json={"max_tokens": 1, "messages": [{"role": "user", "content": "x"}], "context_management": 5})
    assert r.status_code == 400 and "'context_management' must be an object" in r.text


def test_conversations_whose_messages_the_server_would_keep(claude, fake):
    """Anthropic's tool runner asks for a thread, and sends whole conversations where there is none."""
    anthropic = pytest.importorskip("anthropic")

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Weather of a city."""
        return f"SAY:sunny in {city}"
    runner = claude.beta.messages.tool_runner(model="fake", max_tokens=90, tools=[weather], messages=[{"role": "user", "content": "SAY:" + CALL}])
    first, last = list(runner)
    assert first.stop_reason == "tool_use" and last.content[0].text == "sunny in Paris"
    tokens = [r.usage.input_tokens + r.usage.cache_read_input_tokens for r in (first, last)]
    assert tokens[1] > tokens[0]  # what came before is there
    body = {"model": "fake", "max_tokens": 5, "messages": [{"role": "user", "content": "SAY:x"}]}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        r = httpx.post(fake.url + path, json={**body, "thread": {"type": "continue", "previous_message_id": "msg_1"}})
        assert r.status_code == 400 and "'thread'" in r.json()["error"]["message"]
        assert r.json()["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        assert httpx.post(fake.url + path, json={**body, "thread": None}).status_code == 200
    for field, status in (("compaction", 200), ("output_format", 400)):
        asked = {**body, field: {"type": "json_schema", "schema": {}}}
        r = httpx.post(fake.url + "/v1/messages", json=asked)
        assert r.status_code == 400 and f"'{field}'" in r.json()["error"]["message"] and "details" not in r.json()["error"]
        assert httpx.post(fake.url + "/v1/messages/count_tokens", json=asked).status_code == status


def test_anthropic_errors_and_keys(claude, launch):
    import anthropic
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", max_tokens=5, messages=[{"role": "user", "content": "x"}])
    for bad, field in (({"messages": []}, "messages"), ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
                       ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
                       ({"stop_sequences": ["x"] * 17}, "stop_sequences"), ({"extra_body": {"temperature": -1}}, "temperature"),
                       ({"thinking": {"type": "loud"}}, "thinking")):
        with pytest.raises(anthropic.BadRequestError, match=field.replace("[", r"\[")):
            claude.messages.create(**{"model": "fake", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}], **bad})
    # What its clients look for, to make a conversation shorter or ask for less.
    for words, most, text in (("prompt is too long: 4[0-9]{3} tokens > 4095 maximum", 5, "x" * 4500), ("prompt is too long: .* bytes", 5, "x" * 2_000_000),
                              (r"input length and `max_tokens` exceed context limit: \d+ \+ 4096 > 4096", 4096, "x")):
        with pytest.raises(anthropic.BadRequestError, match=words):
            claude.messages.create(model="fake", max_tokens=most, messages=[{"role": "user", "content": text}])
    locked = launch("--api-key", "right")
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=locked.url, api_key="wrong", max_retries=0).messages.count_tokens(model="fake", messages=[{"role": "user", "content": "x"}])
    right = anthropic.Anthropic(base_url=locked.url, api_key="right", max_retries=0)
    assert right.messages.create(model="fake", max_tokens=9, messages=[{"role": "user", "content": "SAY:x"}]).content[0].text == "x"


# What logs have of a request: X-Request-Id by the name that Anthropic's packages read.
def test_anthropic_request_ids(claude):
    import anthropic
    ask = {"max_tokens": 5, "messages": [{"role": "user", "content": "SAY:x"}], "extra_headers": {"X-Request-Id": "mine-1"}}
    assert claude.messages.create(model="fake", **ask)._request_id == "mine-1"
    with pytest.raises(anthropic.NotFoundError) as refused:
        claude.messages.create(model="other", **ask)
    assert refused.value.request_id == "mine-1"
    with claude.messages.stream(model="fake", **ask) as stream:
        assert stream.request_id == "mine-1" and stream.get_final_text() == "x"


def test_models_are_those_of_both_apis(claude, client):
    import anthropic
    page = claude.models.list()
    ids = [m.id for m in page]
    assert ids[0] == "fake" and (page.has_more, page.first_id, page.last_id) == (False, "fake", ids[-1])
    one = claude.models.retrieve("fake")
    assert (one.type, one.display_name, one.lifecycle) == ("model", "fake", "active") and one == page.data[0]
    assert abs(one.created_at.timestamp() - time.time()) < 3600 and one.max_input_tokens == 4096
    with pytest.raises(anthropic.NotFoundError) as refused:
        claude.models.retrieve("other")
    assert refused.value.body["error"]["type"] == "not_found_error"
    assert [m.id for m in client.models.list()] == ids and client.models.retrieve("fake").object == "model"
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("other")
    assert refused.value.code == "model_not_found"


def test_unknown_fields_are_named(fake):
    body = {"model": "fake", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}], "temperatur": 1, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    r = httpx.post(fake.url + "/v1/messages", json=body)
    assert r.status_code == 200 and set(r.headers["X-NestedFP-Ignored"].split(", ")) == {"temperatur", "thinking"}
    r = httpx.post(fake.url + "/v1/responses", json={"input": "x", "n": 5, "truncation": "auto", "max_output_tokens": 2})
    assert r.status_code == 200 and set(r.headers["X-NestedFP-Ignored"].split(", ")) == {"n", "truncation"}
