"""What we promise clients, dashboards and operators, item by item, over the fake model."""

import concurrent.futures
import json
import os
import pathlib
import re
import signal
import socket
import time

import httpx
import pytest

from conftest import Server

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"

# Every parameter that both endpoints take, with a value that asks for something.
COMMON = {
    "model": "fake", "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.01, "presence_penalty": 0.1,
    "frequency_penalty": 0.1, "repetition_penalty": 1.1, "seed": 7, "stop": ["zz", "yy"], "stop_token_ids": [200],
    "ignore_eos": True, "min_tokens": 2, "logit_bias": {"65": -100}, "allowed_token_ids": [97, 98, 99], "bad_words": ["a", "bc"], "n": 2, "prompt_logprobs": 1, "add_special_tokens": False,
    "skip_special_tokens": True, "precision": "exact", "user": "somebody", "metadata": {"a": "b"},
    "truncate_prompt_tokens": 50, "truncation_side": "left", "return_token_ids": True, "return_tokens_as_token_ids": True,
}
COMPLETION = {**COMMON, "prompt": "x", "echo": True, "logprobs": 2, "best_of": 3}
CHAT = {**COMMON, "messages": [{"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]},
                               {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}], "echo": True,
        "max_completion_tokens": 5, "include_reasoning": False, "reasoning_effort": "low", "verbosity": "low", "documents": [{"text": "x"}], "logprobs": True, "top_logprobs": 2, "tool_choice": "none",
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]}


@pytest.mark.parametrize("path,body", [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
def test_every_parameter_is_taken_alone_and_with_the_others(fake, path, body):
    needed = {k: body[k] for k in ("prompt", "messages") if k in body}
    assert httpx.post(fake.url + path, json=body).status_code == 200
    for name, value in body.items():
        alone = {**needed, name: value}
        if name == "top_logprobs":
            alone["logprobs"] = True
        r = httpx.post(fake.url + path, json=alone)
        assert r.status_code == 200, (name, r.text)
    # No parameter is ignored in silence, and none that means something to others is ignored at all.
    for name in ("temperatur", "nestedfp"):
        r = httpx.post(fake.url + path, json={**needed, name: "x"})
        assert r.status_code == 200 and r.headers["X-NestedFP-Ignored"] == name, (name, r.text)
    for name in ("suffix", "use_beam_search", "functions"):
        r = httpx.post(fake.url + path, json={**needed, name: "x"})
        expected = 200 if (name, path) in (("suffix", "/v1/chat/completions"), ("functions", "/v1/completions")) else 400
        assert r.status_code == expected, (name, r.text)
        assert name == (r.headers["X-NestedFP-Ignored"] if expected == 200 else r.json()["error"]["param"])


@pytest.fixture(scope="module")
def strict(launch):
    return launch("--strict-requests")


def test_unknown_fields(fake, strict):
    body = {"messages": [{"role": "user", "content": "SAY:x", "colour": 1}], "temperatur": 1, "a, b\r\nX-Evil: 1": 2,
            "stream": True, "stream_options": {"include_costs": True}}
    r = httpx.post(fake.url + "/v1/chat/completions", json=body)
    assert r.status_code == 200 and "X-Evil" not in r.headers
    assert r.headers["X-NestedFP-Ignored"] == "stream_options.include_costs, messages[0].colour, temperatur, a??b??X-Evil:?1"
    many = httpx.post(fake.url + "/v1/completions", json={"prompt": "SAY:x", **{f"f{i}": i for i in range(2000)}})
    assert many.status_code == 200 and many.headers["X-NestedFP-Ignored"].endswith(", f15, ...")
    r = httpx.post(fake.url + "/tokenize", json={"prompt": "x", "other": 1})
    assert r.status_code == 200 and r.headers["X-NestedFP-Ignored"] == "other"
    inner = [("/v1/responses", {"input": "SAY:x", "reasoning": {"efort": "low", "summary": "auto"}}, "reasoning.efort"),
             ("/v1/messages", {"messages": [{"role": "user", "content": "SAY:x"}], "max_tokens": 9,
                               "thinking": {"type": "enabled", "budget_tokens": 5, "budget": 5}}, "thinking.budget"),
             ("/v1/messages", {"messages": [{"role": "user", "content": "SAY:x"}], "max_tokens": 9, "stop": ["x"]}, "stop")]
    for path, body, name in inner:
        r = httpx.post(fake.url + path, json=body)
        assert r.status_code == 200 and name in r.headers.get("X-NestedFP-Ignored", "").split(", "), (body, r.headers)
    for field in ({"temperatur": 1}, {"stream": True, "stream_options": {"x": 1}}):
        r = httpx.post(strict.url + "/v1/completions", json={"prompt": "x", **field})
        assert r.status_code == 400 and r.json()["error"]["code"] == "unknown_parameter"
    r = httpx.post(strict.url + "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x", "y": 1}]})
    assert r.status_code == 400 and r.json()["error"]["param"] == "messages[0].y"
    for path, body, name in inner:
        r = httpx.post(strict.url + path, json=body)
        assert r.status_code == 400 and f"'{name}'" in r.json()["error"]["message"], r.text


def with_input(*items):
    return {"input": [*items, {"role": "user", "content": "SAY:x"}], "max_output_tokens": 9}


def with_messages(*blocks, role="assistant", **more):
    return {"max_tokens": 9, "messages": [{"role": "user", "content": "q"}, {"role": role, "content": [*blocks]}, {"role": "user", "content": "SAY:x"}], **more}


def chat_with(*messages, **more):
    return {"max_tokens": 9, "messages": [{"role": "user", "content": "q"}, *messages, {"role": "user", "content": "SAY:x"}], **more}


def called(call):
    return chat_with({"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "o"})


TEXT = {"type": "text", "text": "t"}
CHAT_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
TOOL_USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CLAUDES = {"name": "f", "input_schema": {"type": "object"}}


@pytest.mark.parametrize("path,body,ignored", [
    ("/v1/responses", with_input({"role": "user", "content": "q", "nme": "a"}), "input[0].nme"),
    ("/v1/responses", with_input({"role": "user", "content": [{"type": "input_text", "text": "t", "detail": 1}]}), "input[0].content[0].detail"),
    ("/v1/responses", with_input({**CALL, "output": "o"}), "input[0].output"),
    ("/v1/responses", with_input(CALL, {"type": "function_call_output", "call_id": "c", "output": "o", "is_error": True}), "input[1].is_error"),
    ("/v1/responses", with_input({"type": "reasoning", "text": "t"}), "input[0].text"),
    ("/v1/responses", {**with_input(), "tools": [{**FUNCTION, "parameter": {}}]}, "tools[0].parameter"),
    ("/v1/messages", with_messages(TEXT, role="user") | {"system": [{**TEXT, "cache": 1}]}, "system[0].cache"),
    ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": "SAY:x", "name": "a"}]}, "messages[0].name"),
    ("/v1/messages", with_messages({**TEXT, "citation": []}), "messages[1].content[0].citation"),
    ("/v1/messages", with_messages({**TOOL_USE, "arguments": {}}), "messages[1].content[0].arguments"),
    ("/v1/messages", with_messages({"type": "tool_result", "tool_use_id": "c", "error": True}, role="user"), "messages[1].content[0].error"),
    ("/v1/messages", with_messages({"type": "tool_result", "tool_use_id": "c", "content": [{**TEXT, "title": 1}]}, role="user"),
     "messages[1].content[0].content[0].title"),
    ("/v1/messages", with_messages({"type": "thinking", "thinking": "t", "text": "t"}), "messages[1].content[0].text"),
    ("/v1/messages", with_messages(TEXT, tools=[{**CLAUDES, "parameters": {}}]), "tools[0].parameters"),
    ("/v1/responses", {**with_input(), "tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "mod": "auto", "tools": [{"name": "f"}]}}, "tool_choice.mod"),
    ("/v1/messages", with_messages(TEXT, tools=[CLAUDES], tool_choice={"type": "auto", "disable_parallel_tool_calls": True}),
     "tool_choice.disable_parallel_tool_calls"),
    ("/v1/chat/completions", chat_with({"role": "user", "content": [TEXT, {**TEXT, "detail": 1}]}), "messages[1].content[1].detail"),
    ("/v1/chat/completions", called({**CHAT_CALL, "output": "o"}), "messages[1].tool_calls[0].output"),
    ("/v1/chat/completions", called({**CHAT_CALL, "function": {"name": "f", "argument": "{}"}}), "messages[1].tool_calls[0].function.argument"),
    ("/v1/chat/completions", chat_with(tools=[{**CHAT_TOOL, "name": "f"}]), "tools[0].name"),
    ("/v1/chat/completions", chat_with(tools=[CHAT_TOOL, {"type": "function", "function": {"name": "g", "parameter": {}}}]), "tools[1].function.parameter"),
    ("/v1/chat/completions", chat_with(tools=[CHAT_TOOL], tool_choice={"type": "function", "name": "f", "function": {"name": "f"}}), "tool_choice.name"),
    ("/v1/chat/completions", chat_with(tools=[CHAT_TOOL], tool_choice={"type": "function", "function": {"name": "f", "strict": True}}),
     "tool_choice.function.strict"),
    ("/v1/chat/completions", chat_with(tools=[CHAT_TOOL], tool_choice={"type": "allowed_tools", "mode": "auto", "allowed_tools": {"tools": [CHAT_TOOL]}}),
     "tool_choice.mode"),
    ("/v1/chat/completions", chat_with(tools=[CHAT_TOOL], tool_choice={"type": "allowed_tools", "allowed_tools": {"mod": "required", "tools": [CHAT_TOOL]}}),
     "tool_choice.allowed_tools.mod"),
    ("/tokenize", {"messages": [{"role": "user", "content": [{**TEXT, "detail": 1}]}]}, "messages[0].content[0].detail"),
    ("/tokenize", {"messages": [{"role": "user", "content": "t"}], "tools": [{**CHAT_TOOL, "name": "f"}]}, "tools[0].name"),
])
def test_unknown_members_of_items(fake, strict, path, body, ignored):
    r = httpx.post(fake.url + path, json=body)
    assert r.status_code == 200 and r.headers["X-NestedFP-Ignored"] == ignored, r.text
    r = httpx.post(strict.url + path, json=body)
    assert r.status_code == 400 and f"unknown parameter '{ignored}'" in r.text


def test_members_that_clients_send(strict):
    """What the types of OpenAI's, Anthropic's and litellm's packages have: agents send answers back with them."""
    cache, caller = {"cache_control": {"type": "ephemeral"}}, {"type": "direct"}
    output = {"type": "output_text", "text": "t", "annotations": [], "logprobs": [], "parsed": None}
    for path, body in (
            ("/v1/responses", with_input(
                {"type": "message", "role": "user", "status": "completed", "content": [{"type": "input_text", "text": "t", "prompt_cache_breakpoint": {"mode": "explicit"}}]},
                {"type": "reasoning", "id": "r", "status": None, "summary": [{"type": "summary_text", "text": "t"}], "encrypted_content": None,
                 "content": [{"type": "reasoning_text", "text": "t"}]},
                {"type": "message", "role": "assistant", "id": "m", "status": "completed", "phase": "commentary", "content": [output]},
                {**CALL, "id": "f", "status": "completed", "caller": caller, "namespace": "n", "async": False, "parsed_arguments": {}},
                {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "o"}], "id": "o", "status": "completed",
                 "caller": caller, "name": "f", "namespace": "n"})
             | {"tools": [{**FUNCTION, "strict": False, "description": None, "async": False, "allowed_callers": ["direct"], "defer_loading": False,
                           "output_schema": None}]}),
            ("/v1/messages", with_messages(
                {"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "redacted_thinking", "data": "d"}, {**TEXT, **cache, "citations": None},
                {**TOOL_USE, **cache, "caller": caller, "toolset_name": None},
                system=[{**TEXT, **cache, "citations": None}],
                tools=[{**CLAUDES, **cache, "type": "custom", "description": "d", "strict": False, "allowed_callers": ["direct"], "defer_loading": False,
                        "eager_input_streaming": None, "input_examples": []}])),
            ("/v1/messages", with_messages(
                {"type": "tool_result", "tool_use_id": "c", "content": [{**TEXT, **cache, "citations": None}], "is_error": False, "toolset_name": None, **cache},
                role="user")),
            ("/v1/chat/completions", chat_with(
                {"role": "user", "name": "n", **cache, "content": [{**TEXT, **cache, "prompt_cache_breakpoint": {"mode": "explicit"}}]},
                {"role": "assistant", "content": [TEXT, {"type": "refusal", "refusal": "r"}], "name": "n", "refusal": None, "annotations": [], "audio": None,
                 "function_call": None, "reasoning_content": "t", "parsed": None, "provider_specific_fields": {"refusal": None},
                 "tool_calls": [{**CHAT_CALL, "index": 0, "provider_specific_fields": None,
                                 "function": {**CHAT_CALL["function"], "parsed_arguments": {}, "provider_specific_fields": None}}]},
                {"role": "tool", "tool_call_id": "c", "name": "f", **cache, "content": [TEXT]},
                tools=[{**CHAT_TOOL, **cache, "allowed_callers": ["direct"], "defer_loading": False, "input_examples": [],
                        "function": {**CHAT_TOOL["function"], **cache, "description": "d", "strict": None}}],
                tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [CHAT_TOOL]}}))):
        r = httpx.post(strict.url + path, json=body)
        assert r.status_code == 200, r.text


SCHEMA = {"type": "boolean"}


@pytest.mark.parametrize("path,body,ignored", [
    ("/v1/chat/completions", {"response_format": {"type": "json_object", "schemas": SCHEMA}}, "response_format.schemas"),
    ("/v1/chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "mode": 1}}},
     "response_format.json_schema.mode"),
    ("/v1/responses", {"text": {"formt": {"type": "text"}}}, "text.formt"),
    ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "mode": 1}}}, "text.format.mode"),
    ("/v1/messages", {"output_config": {"fromat": 1}}, "output_config.fromat"),
    ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA, "strict": True}}}, "output_config.format.strict"),
])
def test_unknown_fields_of_output_formats(fake, strict, path, body, ignored):
    body = {"input": "x"} | body if path == "/v1/responses" else {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1} | body
    r = httpx.post(fake.url + path, json=body)
    assert r.status_code == 200 and r.headers["X-NestedFP-Ignored"] == ignored
    r = httpx.post(strict.url + path, json=body)
    assert r.status_code == 400 and f"unknown parameter '{ignored}'" in r.text


@pytest.mark.parametrize("path,body", [
    ("/v1/chat/completions", {"response_format": {"type": "json_object", "schema": SCHEMA}}),
    ("/v1/completions", {"response_format": {"type": "json_schema", "schema": SCHEMA}}),
    ("/v1/chat/completions", {"json_schema": SCHEMA, "grammar": ""}),
    ("/v1/completions", {"grammar": 'root ::= space ("true" | "false")\nspace ::= | " " | "\\n"{1,2} [ \\t]{0,20}'}),
    ("/v1/responses", {"text": {"format": {"type": "json_object", "schema": SCHEMA}}}),
    ("/v1/messages", {"json_schema": SCHEMA}),
])
def test_grammars_as_other_servers_take_them(fake, strict, path, body):
    if not httpx.get(fake.url + "/v1/models").json()["data"][0]["grammars"]:
        pytest.skip("built without xgrammar")
    asked = {"/v1/responses": {"input": "x"}, "/v1/completions": {"prompt": "x", "max_tokens": 30}}
    body = asked.get(path, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 30}) | body
    for server in (fake, strict):
        r = httpx.post(server.url + path, json=body, timeout=60)
        assert r.status_code == 200 and "X-NestedFP-Ignored" not in r.headers, r.text
        answer = r.json()
        if path == "/v1/responses":
            text = answer["output"][0]["content"][0]["text"]
        elif path == "/v1/messages":
            text = answer["content"][0]["text"]
        else:
            text = answer["choices"][0].get("text") or answer["choices"][0]["message"]["content"]
        assert text.strip() in ("true", "false"), text


def test_tools_of_responses_that_are_no_functions(fake, strict):
    """Codex sends some with every request."""
    function = {"type": "function", "name": "shell", "parameters": {"type": "object"}}
    others = [{"type": "web_search", "external_web_access": False}, {"type": "custom", "name": "apply_patch"},
              {"type": "namespace", "name": "mcp__a", "tools": [function]}]
    body = {"input": "x", "tools": [others[0], function, *others[1:]], "tool_choice": "auto"}
    r = httpx.post(fake.url + "/v1/responses", json=body)
    assert r.status_code == 200 and r.headers["X-NestedFP-Ignored"] == "tools[0], tools[2], tools[3]", r.text
    assert httpx.post(fake.url + "/v1/responses/input_tokens", json=body).json()["input_tokens"] == httpx.post(
        fake.url + "/v1/responses/input_tokens", json=body | {"tools": [function]}).json()["input_tokens"]
    for url, sent in ((strict.url, body), (fake.url, body | {"tools": others})):
        r = httpx.post(url + "/v1/responses", json=sent)
        assert r.status_code == 400 and "'tools[0].type' is 'web_search'; this server runs no tools of its own" in r.text
    r = httpx.post(fake.url + "/v1/responses", json=body | {"tool_choice": {"type": "web_search"}})
    assert r.status_code == 400 and "tool_choice" in r.text


def test_all_that_vllms_class_of_structured_outputs_has(fake):
    unset = {"json": None, "grammar": None, "choice": None, "json_object": None, "disable_fallback": False, "disable_any_whitespace": False,
             "disable_additional_properties": False, "whitespace_pattern": None, "structural_tag": None}
    r = httpx.post(fake.url + "/v1/completions", json={"prompt": "x", "structured_outputs": {"regex": "ab", **unset}})
    assert r.status_code == 200 and r.json()["choices"][0]["text"] == "ab", r.text
    for more, code in (({"disable_any_whitespace": True}, "unsupported_parameter"), ({"structural_tag": "{}"}, "unsupported_parameter"),
                       ({"regexp": "b"}, "unknown_parameter")):
        error = httpx.post(fake.url + "/v1/completions", json={"prompt": "x", "structured_outputs": more}).json()["error"]
        assert error["code"] == code and error["param"] == f"structured_outputs.{next(iter(more))}"


def test_what_there_is_not_is_said(fake):
    for path in ("/v1/rerank", "/rerank", "/v2/rerank", "/score", "/v1/score", "/pooling", "/classify"):
        r = httpx.post(fake.url + path, json={})
        message = r.json()["error"]["message"]
        assert r.status_code == 404 and f"there is no {path.rsplit('/', 1)[1]} here" in message and "/v1/embeddings" in message


def test_token_ids(fake):
    body = {"prompt": "SAY:hé", "max_tokens": 9, "return_token_ids": True, "logprobs": 0, "return_tokens_as_token_ids": True}
    choice = httpx.post(fake.url + "/v1/completions", json=body).json()["choices"][0]
    expected = [*"hé".encode(), 257]
    assert choice["token_ids"] == expected and choice["prompt_token_ids"] == [*"SAY:hé".encode()]
    assert choice["logprobs"]["tokens"] == [f"token_id:{t}" for t in expected]
    r = httpx.post(fake.url + "/v1/completions", json={**body, "stream": True})
    chunks = [json.loads(e[6:])["choices"][0] for e in r.text.split("\n\n") if e.startswith("data: {")]
    assert sum((c["token_ids"] for c in chunks), []) == expected
    assert [c["prompt_token_ids"] for c in chunks if "prompt_token_ids" in c] == [choice["prompt_token_ids"]]
    chat = {"messages": [{"role": "user", "content": "SAY:hé"}], "return_token_ids": True}
    whole = httpx.post(fake.url + "/v1/chat/completions", json=chat).json()
    assert whole["choices"][0]["token_ids"] == expected and whole["prompt_token_ids"][0] == 256
    r = httpx.post(fake.url + "/v1/chat/completions", json={**chat, "stream": True})
    chunks = [json.loads(e[6:]) for e in r.text.split("\n\n") if e.startswith("data: {")]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert sum((c["choices"][0].get("token_ids", []) for c in chunks), []) == expected


def test_prompts_are_truncated(fake):
    def used(**more):
        return httpx.post(fake.url + "/v1/completions", json={"prompt": "x" * 5000 + "SAY:yes", "max_tokens": 10, **more})
    assert used().status_code == 400
    r = used(truncate_prompt_tokens=100).json()
    assert r["usage"]["prompt_tokens"] == 100 and r["choices"][0]["text"] == "yes"
    assert used(truncate_prompt_tokens=-1).json()["usage"]["prompt_tokens"] == 4096 - 10
    assert used(truncate_prompt_tokens=5000).json()["error"]["param"] == "truncate_prompt_tokens"
    # What is left of it is what is echoed, so that offsets are those of the text.
    choice = used(truncate_prompt_tokens=9, echo=True, logprobs=0).json()["choices"][0]
    assert choice["text"] == "xxSAY:yesyes" and choice["logprobs"]["text_offset"] == list(range(13))
    # Or what comes first.
    assert used(truncate_prompt_tokens=9, truncation_side="left", echo=True).json()["choices"][0]["text"] == "xxSAY:yesyes"
    assert used(truncate_prompt_tokens=9, truncation_side="right", echo=True).json()["choices"][0]["text"] == "xxxxxxxxxabcdefghij"
    assert used(truncation_side="middle").json()["error"]["param"] == "truncation_side"


@pytest.mark.parametrize("path,body,name", [
    ("/v1/messages", with_messages({**TOOL_USE, "id": 5}), "messages[1].content[0].id"),
    ("/v1/messages", with_messages({"type": "thinking", "thinking": 5}), "messages[1].content[0].thinking"),
    ("/v1/messages", with_messages({"type": "tool_result", "tool_use_id": 5}, role="user"), "messages[1].content[0].tool_use_id"),
    ("/v1/messages", with_messages({"type": "tool_result", "tool_use_id": "c", "is_error": "true"}, role="user"), "messages[1].content[0].is_error"),
    ("/v1/messages", with_messages(TEXT, tools=[CLAUDES], tool_choice={"type": "auto", "disable_parallel_tool_use": "true"}),
     "tool_choice.disable_parallel_tool_use"),
    ("/v1/messages", with_messages(TEXT, tools=[{**CLAUDES, "strict": "true"}]), "tools[0].strict"),
    ("/v1/responses", {**with_input(), "tools": [{**FUNCTION, "description": 5}]}, "tools[0].description"),
    ("/v1/chat/completions", chat_with(tools=[{"type": "function", "function": {"name": "f", "strict": "true"}}]), "tools[0].function.strict"),
    *[("/v1/responses", {**with_input(), "tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "mode": mode, "tools": [{"name": "f"}]}},
       "tool_choice.mode") for mode in ("none", 5)],
])
def test_what_is_of_a_wrong_type_is_not_taken_for_missing(fake, path, body, name):
    r = httpx.post(fake.url + path, json=body)
    assert r.status_code == 400 and f"'{name}'" in r.json()["error"]["message"], r.text


def test_sampling_defaults(launch, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25, "top_k": 7}')
    server = launch("--generation-config", tmp_path)
    assert httpx.get(server.url + "/v1/models").json()["data"][0]["default_sampling_params"] == {"temperature": 0.25, "top_k": 7}
    # The fake model says with what it was sampled.
    def seen(**more):
        return httpx.post(server.url + "/v1/completions", json={"prompt": "HOW?", "max_tokens": 40, **more}).json()["choices"][0]["text"]
    assert seen() == "temperature 0.25 top_k 7"
    assert seen(temperature=1) == "temperature 1 top_k 7"
    assert seen(temperature=None, top_k=-1) == "temperature 0.25 top_k 0"
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 100}')
    server = launch("--generation-config", tmp_path, "--max-model-len", 400)
    assert httpx.get(server.url + "/v1/models").json()["data"][0]["default_sampling_params"] == {"max_tokens": 100}
    def length(path="chat/completions", text="x", **more):
        body = {"prompt": text} if path == "completions" else {"messages": [{"role": "user", "content": text}]}
        r = httpx.post(f"{server.url}/v1/{path}", json={**body, **more}).json()
        assert r["choices"][0]["finish_reason"] == "length", r
        return r["usage"]["completion_tokens"], r["usage"]["total_tokens"]
    assert length()[0] == 100
    assert [length(max_tokens=n)[0] for n in (7, 200)] == [7, 200]
    assert length(min_tokens=150)[0] == 150
    assert length("completions")[0] == 16
    assert length(text="x" * 330)[1] == 400


def test_fields_for_the_template(fake):
    """The fake model's template reads neither."""
    body = {"messages": [{"role": "user", "content": "SAY:x"}], "reasoning_effort": "low", "verbosity": "high"}
    r = httpx.post(fake.url + "/v1/chat/completions", json=body)
    assert r.status_code == 200 and r.headers["X-NestedFP-Ignored"] == "reasoning_effort, verbosity"
    r = httpx.post(fake.url + "/v1/chat/completions", json={**body, "reasoning_effort": "much"})
    assert r.status_code == 400 and r.json()["error"]["param"] == "reasoning_effort"


def test_the_document_names_every_path_and_parameter(fake):
    document = httpx.get(fake.url + "/openapi.json").json()
    assert document["openapi"].startswith("3.")
    schemas = document["components"]["schemas"]
    assert set(COMPLETION) <= set(schemas["CompletionRequest"]["properties"])
    assert set(CHAT) <= set(schemas["ChatRequest"]["properties"])
    for path, methods in document["paths"].items():
        for method in methods:
            r = httpx.request(method, fake.url + path.replace("{id}", "fake"), json={} if method == "post" else None)
            # None of this name, and what only --demo-load has.
            missing = {"/v1/responses/{id}": "fake", "/v1/responses/{id}/input_items": "fake", "/nestedfp/demo-load": "--demo-load"}.get(path)
            assert (r.status_code == 404 and missing in r.text) if missing else r.status_code not in (404, 405), (method, path)
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/models", "/v1/models/{id}", "/tokenize", "/detokenize",
                 "/health", "/ping", "/version", "/metrics", "/openapi.json", "/load", "/"):
        assert path in document["paths"], path


@pytest.mark.parametrize("body,param", [
    ({"include": [5]}, "include[0]"), ({"include": ["message.output_text.logprobs", None]}, "include[1]"),
    ({"include": [["message.output_text.logprobs"]]}, "include[0]"), ({"include": {}}, "include"),
    ({"service_tier": "flex"}, "service_tier"), ({"service_tier": "x"}, "service_tier"), ({"service_tier": 5}, "service_tier"),
])
def test_options_of_a_response_that_are_wrong(fake, body, param):
    r = httpx.post(fake.url + "/v1/responses", json={"input": "SAY:x", **body})
    assert r.status_code == 400 and r.json()["error"]["param"] == param and param in r.json()["error"]["message"], r.text


def test_what_a_response_cannot_include(fake, strict):
    known = {"input": "SAY:x", "include": ["reasoning.encrypted_content", "file_search_call.results"], "service_tier": "default"}
    for server in (fake, strict):
        r = httpx.post(server.url + "/v1/responses", json=known)
        assert r.status_code == 200 and "X-NestedFP-Ignored" not in r.headers, r.text
    unknown = {"input": "SAY:x", "include": ["message.output_text.logprobs", "message.output_text.logprob"]}
    r = httpx.post(fake.url + "/v1/responses", json=unknown)
    assert r.status_code == 200 and r.headers["X-NestedFP-Ignored"] == "include[1]"
    r = httpx.post(strict.url + "/v1/responses", json=unknown)
    assert r.status_code == 400 and r.json()["error"]["param"] == "include[1]" and "reasoning.encrypted_content" in r.text


@pytest.mark.parametrize("body,param", [
    ({"n": 129}, "n"), ({"stop": ["x"] * 17}, "stop"), ({"stop": "x" * 2000}, "stop"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"), ({"stop_token_ids": [1] * 257}, "stop_token_ids"),
    ({"bad_words": ["x"] * 1025}, "bad_words"), ({"bad_words": ["x" * 1025]}, "bad_words[0]"), ({"allowed_token_ids": [1] * 300}, "allowed_token_ids"),
    ({"logprobs": 21}, "logprobs"), ({"guided_regex": "x" * (300 << 10)}, "guided_regex"),
    ({"guided_json": json.loads('{"not":' * 33 + "{}" + "}" * 33)}, "guided_json"), ({"precision": "fp4"}, "precision"),
])
def test_limits(fake, body, param):
    r = httpx.post(fake.url + "/v1/completions", json={"prompt": "x", **body})
    assert r.status_code == 400 and r.json()["error"]["param"] == param, r.text


def test_usage_says_in_which_precision(fake):
    body = {"prompt": "x", "max_tokens": 4, "precision": "fast"}
    usage = httpx.post(fake.url + "/v1/completions", json=body).json()["usage"]["nestedfp"]
    assert usage["completion"] == {"fp16_tokens": 0, "fp8_tokens": 4} and usage["prompt"]["fp16_tokens"] == 0
    r = httpx.post(fake.url + "/v1/completions", json={**body, "stream": True})
    chunks = [json.loads(e[6:]) for e in r.text.split("\n\n") if e.startswith("data: {")]
    assert chunks[-1]["nestedfp"] == usage
    assert all("nestedfp" not in c for c in chunks[:-1])


def test_histograms_add_up(fake):
    httpx.post(fake.url + "/v1/completions", json={"prompt": "x", "max_tokens": 3})
    text = httpx.get(fake.url + "/metrics").text
    for name in re.findall(r"^# TYPE (\S+) histogram$", text, re.M):
        series = {}
        for labels, bound, count in re.findall(rf'^{re.escape(name)}_bucket\{{(.*?),?le="([^"]+)"\}} (\d+)$', text, re.M):
            series.setdefault(labels, []).append((float(bound), int(count)))
        assert series, name
        for labels, buckets in series.items():
            assert [b for b, _ in buckets] == sorted(b for b, _ in buckets) and buckets[-1][0] == float("inf")
            assert [c for _, c in buckets] == sorted(c for _, c in buckets)
            labelled = f"{{{labels}}}" if labels else ""
            assert f"{name}_count{labelled} {buckets[-1][1]}\n" in text
    assert float(re.search(r"^process_cpu_seconds_total (\S+)$", text, re.M).group(1)) > 0
    assert int(re.search(r"^process_resident_memory_bytes (\d+)$", text, re.M).group(1)) > 1 << 20
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert fake.metric(f"vllm:{name}_count") > 0
    assert 'finished_reason="length"' in text and 'precision="fp8"' in text and 'model_name="fake"' in text


def test_the_dashboard_shows_metrics_that_there_are(fake):
    dashboard = json.loads((DOCS / "grafana-dashboard.json").read_text())
    assert dashboard["panels"] and len({p["id"] for p in dashboard["panels"]}) == len(dashboard["panels"])
    there = set(re.findall(r"^([a-z]+:[a-z0-9_]+)[ {]", httpx.get(fake.url + "/metrics").text, re.M))
    used = set()
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            names = re.findall(r"(?:vllm|nestedfp):[a-z0-9_]+", target["expr"])
            assert names, target
            used.update(names)
    assert used and used <= there, used - there
    documented = set(re.findall(r"`((?:vllm|nestedfp):[a-z0-9_]+)", (DOCS / "serving.md").read_text()))
    missing = {name for name in documented if name not in there and name + "_count" not in there}
    assert documented and not missing, missing


def test_health_fails_while_a_step_does_not_finish(launch):
    server = launch("--step-us", 3_000_000, "--stall-timeout", "0.5")
    assert httpx.get(server.url + "/health").status_code == 200
    with httpx.stream("POST", server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 2, "stream": True},
                      timeout=30) as answer:
        end = time.time() + 10
        while (r := httpx.get(server.url + "/health")).status_code == 200 and time.time() < end:
            time.sleep(0.05)
        assert r.status_code == 503 and r.json()["error"]["code"] == "stalled"
        assert httpx.get(server.url + "/ping").status_code == 503
        assert "[DONE]" in answer.read().decode()
    assert httpx.get(server.url + "/health").status_code == 200


@pytest.mark.parametrize("flags, message, told", [
    ([], "the fake device is lost", "the device is lost"),
    (["--throws"], "the engine ended by an exception: std::bad_alloc", "the engine is lost"),
])
def test_a_lost_device_ends_every_request_and_the_server(tmp_path, flags, message, told):
    with open(tmp_path / "log", "w", encoding="utf-8") as log:
        server = Server([os.environ["NFP_SERVE_FAKE"], "--step-us", "20000", "--fails-after", "20", *flags], log)
    later = server.connect()
    later.sendall(b"GET /health HTTP/1.1\r\nHo")  # half a request, so that the connection stays when others are refused
    body = {"prompt": "x", "max_tokens": 100}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        whole = pool.submit(lambda: httpx.post(server.url + "/v1/completions", json=body, timeout=30))
        with httpx.stream("POST", server.url + "/v1/completions", json=body | {"stream": True}, timeout=30) as answer:
            streamed = answer.read().decode()
    assert whole.result().status_code == 503 and message in whole.result().json()["error"]["message"]
    assert message in streamed
    try:  # health is 503 as long as there is somebody to say so
        later.sendall(b"st: x\r\n\r\n")
        answer = read_response(later)
    except OSError:
        answer = b""
    later.close()
    assert not answer or (b"503" in answer.split(b"\r\n")[0] and b"device_failed" in answer), answer
    assert server.process.wait(30) == 1
    assert told in server.output()


def test_a_device_that_is_lost_while_the_server_drains_is_told_too(tmp_path):
    with open(tmp_path / "log", "w", encoding="utf-8") as log:
        server = Server([os.environ["NFP_SERVE_FAKE"], "--step-us", "20000", "--fails-after", "50"], log)
    body = {"prompt": "x", "max_tokens": 100, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=30) as answer:
        pieces = answer.iter_text()
        streamed = next(pieces)
        server.process.terminate()
        streamed += "".join(pieces)
    assert "the fake device is lost" in streamed
    assert server.process.wait(30) == 1
    assert "the device or the engine failed" in server.output()


def request_bytes(method, path, body=b""):
    return (f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            .encode() + body)


def read_response(s):
    got = b""
    while b"\r\n\r\n" not in got:
        part = s.recv(65536)
        if not part:
            return got
        got += part
    return got


def test_a_draining_server_refuses_on_open_connections(launch):
    server = launch("--step-us", 20000)
    running = server.connect()
    running.sendall(request_bytes("POST", "/v1/completions", json.dumps({"prompt": "x", "max_tokens": 100}).encode()))
    other, third = server.connect(), server.connect()
    for s in (other, third):  # half a request, so that the connection is not idle
        s.sendall(b"GET /health HTTP/1.1\r\nHo" if s is other else b"POST /v1/completions HTTP/1.1\r\nHo")
    end = time.time() + 10
    while server.metric("vllm:num_requests_running") == 0 and time.time() < end:
        time.sleep(0.01)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    other.sendall(b"st: x\r\n\r\n")
    assert read_response(other).startswith(b"HTTP/1.1 503 ")
    third.sendall(b"st: x\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
    assert read_response(third).startswith(b"HTTP/1.1 503 ")
    answer = read_response(running)
    assert answer.startswith(b"HTTP/1.1 200 ")
    for s in (running, other, third):
        s.close()
    assert server.process.wait(20) == 0


def test_idle_connections_are_closed(launch):
    server = launch("--idle-timeout-ms", 300)
    with server.connect() as s:
        s.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_response(s).startswith(b"HTTP/1.1 200 ")
        s.settimeout(5)
        begin = time.time()
        assert s.recv(100) == b""
        assert 0.1 < time.time() - begin < 4


def log_lines(server, request):
    """Of a request, once there is one: what a server writes is read by and by."""
    end = time.time() + 5
    while True:
        lines = [one for one in server.output().splitlines() if f"request={request} " in one]
        if lines or time.time() > end:
            return lines
        time.sleep(0.05)


def test_the_log_has_counts_and_no_text(launch):
    server = launch("--log-requests")
    httpx.post(server.url + "/v1/completions", headers={"X-Request-Id": "mine-7"},
               json={"prompt": "very private", "max_tokens": 5, "precision": "fast"})
    line, = log_lines(server, "mine-7")
    for part in ("outcome=ok", "prompt_tokens=12", "completion_tokens=5", "fp16_tokens=0", "fp8_tokens=5"):
        assert part in line, line
    assert re.search(r"ttft_ms=[0-9.]+ tpot_ms=[0-9.]+", line)
    assert "private" not in server.output() and "abcde" not in server.output()


def test_the_log_has_what_was_refused(launch):
    server = launch("--log-requests")
    chat = [{"role": "user", "content": "very private"}]
    for number, (path, body, status) in enumerate((("/v1/completions", {"prompt": "very private", "top_p": 9}, 400),
                                                   ("/v1/chat/completions", {"messages": chat, "model": "none"}, 404),
                                                   ("/v1/completions", '{"prompt": "very private" "x"}', 400),
                                                   ("/v1/embeddings", {"input": "very private", "dimensions": -1}, 400),
                                                   ("/v1/responses", {"input": "very private", "previous_response_id": "x"}, 400),
                                                   ("/v1/messages", {"messages": chat}, 400))):
        r = httpx.post(server.url + path, content=body if isinstance(body, str) else json.dumps(body),
                       headers={"X-Request-Id": f"mine-{number}", "Content-Type": "application/json"})
        assert r.status_code == status, r.text
        lines = log_lines(server, f"mine-{number}")
        assert len(lines) == 1 and f" status={status} error=\"" in lines[0] and " endpoint=" in lines[0], lines
    assert "endpoint=completions status=400 error=\"top_p is 9" in server.output()
    assert "private" not in server.output()


def test_the_log_has_what_was_refused_before_its_body(launch):
    server = launch("--log-requests", "--api-key", "secret-key")
    key = {"Authorization": "Bearer secret-key"}
    for number, (method, path, headers, status, endpoint) in enumerate((
            ("POST", "/v1/chat/completions", {}, 401, "chat"),
            ("GET", "/v1/models", {"Authorization": "Bearer wrong-key"}, 401, '"/v1/models"'),
            ("POST", "/chat/completions", key, 404, '"/chat/completions"'),
            ("POST", "/a%0Aline", key, 404, '"/a%0Aline"'),
            ("GET", "/v1/completions", key, 405, '"/v1/completions"'),
            ("POST", "/v1/completions", {**key, "Content-Type": "text/plain"}, 415, "completions"))):
        r = httpx.request(method, server.url + path, headers={**headers, "X-Request-Id": f"mine-{number}"})
        assert r.status_code == status, r.text
        lines = [one for one in server.output().splitlines() if f"request=mine-{number} " in one]
        assert len(lines) == 1 and f" endpoint={endpoint} status={status} error=\"" in lines[0], lines
    assert "-key" not in server.output()


def test_the_server_listens_only_where_it_is_told(fake):
    with fake.connect():
        pass
    with pytest.raises(ConnectionRefusedError):  # the default is 127.0.0.1, not all of this machine's addresses
        socket.create_connection(("127.0.0.2", fake.port), timeout=2)
