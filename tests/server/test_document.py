"""/openapi.json against real answers: no member of any answer or stream event that it does not name."""

import json

import httpx
import pytest

jsonschema_rs = pytest.importorskip("jsonschema_rs")

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALLS = 'SAY:<think>a</think>hm <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
IDS = {"return_token_ids": True, "stop": "zz"}


def closed(schema):
    """The same, where objects whose members it names have no others."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: closed(value) for key, value in schema.items()}
    if isinstance(out.get("properties"), dict) and "type" in out:
        out.setdefault("additionalProperties", False)
    return out


class Document:
    def __init__(self, url):
        self.url = url
        self.paths = (document := httpx.get(url + "/openapi.json").json())["paths"]
        self.components = closed(document["components"])
        self.seen, self.faults = set(), set()

    def check(self, schema, value, where):
        try:
            jsonschema_rs.validate({**closed(schema), "components": self.components}, value)
        except jsonschema_rs.ValidationError as e:
            self.faults.add(f"{where}: {e.message[-300:]} at {list(e.instance_path)}")

    def ask(self, method, path, body=None, known=None, status=200, **more):
        """`known`: the path in the document, where it has a parameter."""
        r = httpx.request(method, self.url + path, **({} if body is None else {"json": body}), timeout=60, **more)
        where = f"{method} {known or path}"
        assert r.status_code == status, (where, body, r.text)
        kind = r.headers["Content-Type"].split(";")[0]
        content = self.paths[known or path][method.lower()]["responses"][str(status)]["content"][kind]
        self.seen.add((method.lower(), known or path, kind))
        if kind == "application/json":
            self.check(content["schema"], r.json(), where)
        elif kind == "text/event-stream":
            events = [dict(line.split(": ", 1) for line in one.split("\n")) for one in r.text.split("\n\n") if one]
            for event in events:
                self.check(content["schema"], event, where)
                if event["data"] != "[DONE]":
                    data = json.loads(event["data"])
                    assert event.get("event", data.get("type")) == data.get("type"), where
                    self.check(content["schema"]["properties"]["data"]["contentSchema"], data, where)
            return events
        return r

    def both(self, path, body, **more):
        """Whole and streamed."""
        for stream in ({}, {"stream": True}):
            asked = {k: v for k, v in body.items() if not (stream and k in ("prompt_logprobs", "best_of"))}
            if stream and path in ("/v1/completions", "/v1/chat/completions"):
                asked["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
            self.ask("POST", path, {**asked, **stream}, **more)


def chat(text, **more):
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 200, **more}


ASKS = {"/v1/completions": {"prompt": "x"}, "/v1/chat/completions": chat("x"), "/v1/responses": {"input": "x"}, "/v1/messages": chat("x"),
        "/v1/embeddings": {"input": "x"}, "/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [1]}}


def test_the_document_names_all_members(launch):
    d = Document(launch("--demo-load", "--reasoning-parser", "think").url)
    for path in ("/", "/health", "/ping", "/version", "/metrics", "/openapi.json", "/load", "/v1/models", "/tokenizer_info", "/nestedfp/timeline"):
        d.ask("GET", path)
    d.ask("POST", "/ping")
    d.ask("POST", "/nestedfp/demo-load?rate=0", {}, known="/nestedfp/demo-load")
    d.ask("GET", "/v1/models/fake", known="/v1/models/{id}")
    for more in ({}, {"return_token_strs": True}):
        d.ask("POST", "/tokenize", {"prompt": "x", **more})
    d.ask("POST", "/detokenize", {"tokens": [65]})
    for more in ({}, {"encoding_format": "base64"}, {"slo_ttft_ms": 1e6}):
        d.ask("POST", "/v1/embeddings", {"input": ["x", "y"], **more})

    for more in ({}, {**IDS, "logprobs": 2, "prompt_logprobs": 1, "n": 2, "best_of": 3, "echo": True}, {"stop": "b"}, {"stop_token_ids": [98]},
                 {"slo_ttft_ms": 1e6, "slo_itl_ms": 1e6}, {"max_tokens": 0, "echo": True, "logprobs": 0}):
        d.both("/v1/completions", {"prompt": "SAY:abc", **more})
        if "max_tokens" not in more:
            d.both("/v1/chat/completions", chat("SAY:abc", **{k: v for k, v in more.items() if k not in ("best_of", "logprobs")},
                                                logprobs=True, top_logprobs=2))
    for more in ({}, {"tools": [TOOL]}, {"tools": [TOOL], "logprobs": True, **IDS}):
        d.both("/v1/chat/completions", chat(CALLS, **more))

    function = {"type": "function", **TOOL["function"]}
    for more in ({}, {"input": CALLS, "tools": [function], "max_output_tokens": 300}, {"max_output_tokens": 1}, {"input": "x", "max_output_tokens": 3},
                 {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "instructions": "a", "metadata": {"a": "b"}, "user": "u"}):
        d.both("/v1/responses", {"input": "SAY:abc", **more})
    first = d.ask("POST", "/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": CALLS}]}], "tools": [function]}).json()
    d.ask("POST", "/v1/responses", {"input": "SAY:d", "previous_response_id": first["id"]})
    d.ask("POST", "/v1/responses/input_tokens", {"input": "x"})
    d.ask("GET", f"/v1/responses/{first['id']}", known="/v1/responses/{id}")
    d.ask("GET", f"/v1/responses/{first['id']}/input_items", known="/v1/responses/{id}/input_items")
    d.ask("DELETE", f"/v1/responses/{first['id']}", known="/v1/responses/{id}")

    claudes = {"name": "f", "input_schema": {"type": "object"}}
    for more in ({}, {"stop_sequences": ["b"]}, {"max_tokens": 1}, {"messages": [{"role": "user", "content": CALLS}], "tools": [claudes]}):
        d.both("/v1/messages", chat("SAY:abc", **more))
    d.ask("POST", "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}]})

    documented = {(method, path, kind) for path, methods in d.paths.items() for method, operation in methods.items()
                  for kind in operation["responses"]["200"]["content"]}
    assert documented == d.seen and not d.faults, "\n".join(sorted(d.faults))


def test_the_document_names_all_members_of_errors(launch):
    server = launch("--api-key", "k", "--max-body", 4000)
    d = Document(server.url)
    key = {"headers": {"Authorization": "Bearer k"}}
    for path in ASKS:
        d.ask("POST", path, {}, status=401)
        d.ask("POST", path, {"model": 5}, status=400, **key)
        d.ask("POST", path, {"x": "y" * 5000}, status=413, **key)
        d.ask("POST", path, {"model": "other", **ASKS[path]}, status=404, **key)
    d.ask("POST", "/v1/messages", chat("x", thread={"id": "a"}), status=400, **key)
    for headers in ({}, {"Anthropic-Version": "2023-06-01"}):
        d.ask("GET", "/v1/models", status=401, headers=headers)
        d.ask("GET", "/v1/models/other", known="/v1/models/{id}", status=404, headers={**headers, "Authorization": "Bearer k"})
    d.ask("GET", "/v1/responses/resp_a", known="/v1/responses/{id}", status=404, **key)
    assert not d.faults, "\n".join(sorted(d.faults))


# Where no token is left.
@pytest.mark.parametrize("path", [path for path in ASKS if path.startswith("/v1") and path != "/v1/embeddings"])
def test_the_document_names_all_members_of_errors_in_streams(fake, path):
    d = Document(fake.url)
    events = d.ask("POST", path, {**ASKS[path], "allowed_token_ids": [97], "bad_words": ["aaa"], "stream": True})
    assert "allowed_token_ids" in json.dumps(events) and not d.faults, "\n".join(sorted(d.faults))
