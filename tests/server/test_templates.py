"""Chat templates of other models, tools without a template for them, thoughts: through the server, with openai's client."""

import json

import httpx
import openai
import pytest

TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Weather of a city",
          "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}}]
PLAIN = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}<|im_start|>assistant\\n"
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + PLAIN
SILENT = "{% for m in messages if m['role'] != 'system' %}" + PLAIN.split("%}", 1)[1]  # leaves the system's messages out


def client_of(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def say(text, **more):
    return {"model": "fake", "messages": [{"role": "user", "content": "SAY:" + text}], **more}


def streamed(client, **request):
    text, thoughts, calls = "", "", {}
    for chunk in client.chat.completions.create(stream=True, **request):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        extra = delta.model_extra or {}
        thoughts += extra.get("reasoning_content") or ""
        assert extra.get("reasoning_content") == extra.get("reasoning")
        for c in delta.tool_calls or []:
            part = calls.setdefault(c.index, ["", ""])
            part[0] += c.function.name or ""
            part[1] += c.function.arguments or ""
    return text, thoughts, [tuple(calls[i]) for i in sorted(calls)]


@pytest.mark.parametrize("template", [PLAIN, NO_SYSTEM, SILENT])
def test_tools_without_a_template_for_them(launch, tmp_path, template):
    (tmp_path / "t.jinja").write_text(template)
    server = launch("--chat-template", tmp_path / "t.jinja", "--tool-call-parser", "auto")
    client = client_of(server)
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
    r = client.chat.completions.create(**say("One moment." + call, tools=TOOLS))
    assert r.choices[0].message.tool_calls[0].function.name == "weather" and r.choices[0].message.content == "One moment."
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "weather?"},
                {"role": "assistant", "tool_calls": [c.model_dump() for c in r.choices[0].message.tool_calls]},
                {"role": "tool", "tool_call_id": "x", "content": "SAY:sunny"}]
    assert client.chat.completions.create(model="fake", messages=messages, tools=TOOLS).choices[0].message.content == "sunny"
    # What the model sees.
    tokens = httpx.post(server.url + "/tokenize", json={"messages": messages, "tools": TOOLS}).json()["tokens"]
    text = httpx.post(server.url + "/detokenize", json={"tokens": tokens}).json()["prompt"]
    for part in ("Be brief.", '"name":"weather"', '<tool_call>\n{"name":"weather","arguments":{"city":"Paris"}}\n</tool_call>',
                 "<tool_response>\nSAY:sunny\n</tool_response>"):
        assert part in text, (part, text)
    assert ("<|im_start|>system" in text) == (template is PLAIN)
    # Without a message of the user, too.
    tokens = httpx.post(server.url + "/tokenize", json={"messages": messages[:1], "tools": TOOLS}).json()["tokens"]
    text = httpx.post(server.url + "/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert "Be brief." in text and '"name":"weather"' in text, text


@pytest.mark.parametrize("format,text,content,arguments", [
    ("qwen3_coder", "Hm.<tool_call><function=weather><parameter=city>Paris</parameter><parameter=days>3</parameter></function></tool_call>", "Hm.",
     {"city": "Paris", "days": 3}),
    ("pythonic", "[weather(city='Paris', days=3)]", "", {"city": "Paris", "days": 3}),
    ("phi4_mini_json", 'functools[{"name": "weather", "arguments": {"city": "Paris"}}]', "", {"city": "Paris"}),
    ("gemma", "<start_function_call>call:weather{city:<escape>Paris<escape>}<end_function_call>", "", {"city": "Paris"}),
    ("gpt_oss", '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>', "", {"city": "Paris"}),
])
def test_forms_of_calls(launch, format, text, content, arguments):
    client = client_of(launch("--tool-call-parser", format))
    message = client.chat.completions.create(**say(text, tools=TOOLS)).choices[0].message
    assert (message.content or "") == content
    assert [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls] == [("weather", arguments)]
    shown, _, calls = streamed(client, **say(text, tools=TOOLS))
    assert shown == content and [(n, json.loads(a)) for n, a in calls] == [("weather", arguments)]


def test_thoughts(launch, tmp_path):
    (tmp_path / "t.jinja").write_text(PLAIN + "{% if enable_thinking %}<think>{% endif %}{% if false %}{{ reasoning_effort }}{% endif %}")
    client = client_of(launch("--chat-template", tmp_path / "t.jinja"))
    answer = "<think> It is sunny there. </think> Sunny."
    message = client.chat.completions.create(**say(answer)).choices[0].message
    assert message.content == "Sunny." and message.model_extra["reasoning_content"] == "It is sunny there."
    assert message.model_extra["reasoning"] == "It is sunny there."
    assert streamed(client, **say(answer))[:2] == ("Sunny.", "It is sunny there.")
    call = answer + '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    assert streamed(client, **say(call, tools=TOOLS)) == ("Sunny.", "It is sunny there.", [("weather", "{}")])
    # The prompt opens the thoughts.
    inside = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    assert client.chat.completions.create(**say("Hm.<|im_end|>", **inside)).choices[0].message.model_extra["reasoning_content"] == "Hm."
    quiet = client.chat.completions.create(**say(answer, extra_body={"include_reasoning": False})).choices[0].message
    assert quiet.content == "Sunny." and not {"reasoning_content", "reasoning"} & set(quiet.model_extra)
    # The other APIs have them too.
    r = client.responses.create(model="fake", input="SAY:" + answer, reasoning={"effort": "low"})
    assert [o.type for o in r.output] == ["reasoning", "message"] and r.output[0].content[0].text == "It is sunny there."
    events = [e.type for e in client.responses.create(model="fake", input="SAY:" + answer, stream=True)]
    assert "response.reasoning_text.done" in events and events[-1] == "response.completed"
    body = {"max_tokens": 80, "messages": [{"role": "user", "content": "SAY:" + answer}]}
    blocks = httpx.post(str(client.base_url).rstrip("/") + "/messages", json=body).json()["content"]
    assert [b["type"] for b in blocks] == ["thinking", "text"] and blocks[0]["thinking"] == "It is sunny there."


def test_thoughts_are_left_alone_without_a_parser(launch):
    server = launch("--reasoning-parser", "none")
    assert client_of(server).chat.completions.create(**say("<think>x</think>y")).choices[0].message.content == "<think>x</think>y"


def test_gpt_oss_without_tools(launch):
    client = client_of(launch("--reasoning-parser", "gpt_oss"))
    text = "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>Paris."
    assert streamed(client, **say(text))[:2] == ("Paris.", "Easy.")


def test_chat_template_names(launch):
    tokens = httpx.post(launch("--chat-template", "chatml").url + "/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()
    assert tokens["tokens"][0] == 256
    with pytest.raises(RuntimeError, match="--chat-template nowhere.jinja: is no file"):
        launch("--chat-template", "nowhere.jinja")
