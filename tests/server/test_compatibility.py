"""docs/compatibility.md is what scripts/gen_compatibility.py makes, and says what the server does."""

import importlib.util
import pathlib
import re

import httpx
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("gen_compatibility", ROOT / "scripts" / "gen_compatibility.py")
table = importlib.util.module_from_spec(spec)
spec.loader.exec_module(table)

NEEDED = {
    "ChatRequest": {"messages": [{"role": "user", "content": "SAY:x"}]},
    "CompletionRequest": {"prompt": "SAY:x"},
    "ResponsesRequest": {"input": "SAY:x"},
    "MessagesRequest": {"messages": [{"role": "user", "content": "SAY:x"}], "max_tokens": 5},
    "EmbeddingRequest": {"input": "x"},
}
# Values of fields that mean something only with others, or that have no simple one.
VALUES = {
    "messages": None, "input": None, "prompt": None, "model": "fake", "stop": "zz", "logit_bias": {"65": -1}, "allowed_token_ids": [120, 257], "bad_words": ["zz"], "response_format": {"type": "text"},
    "stream_options": None, "tools": None, "tool_choice": None, "top_logprobs": None, "previous_response_id": None,
    "prompt_logprobs": None, "n": 2, "best_of": 2, "thinking": None, "output_config": None, "reasoning": None, "text": None, "system": "a",
    "instructions": "a", "include": [], "truncation": None, "truncation_side": "right", "modalities": ["text"], "service_tier": "auto", "store": None, "reasoning_effort": None,
    "verbosity": None, "documents": None, "structured_outputs": None, "guided_json": None, "guided_regex": None,
    "guided_choice": None, "guided_grammar": None, "grammar": None, "json_schema": None, "temperature": 0.5, "top_p": 0.5, "min_p": 0.1, "precision": "auto", "metadata": {"a": "b"},
    "user": "a", "safety_identifier": "a", "prompt_cache_key": "a", "prompt_cache_retention": "24h", "cache_salt": "a",
    "repetition_penalty": 1.1, "stop_token_ids": [7], "stop_sequences": ["zz"], "chat_template_kwargs": {"a": 1}, "encoding_format": "float",
    "pooling": "mean", "embed_dtype": "float32", "endianness": "little", "continue_final_message": None, "slo_ttft_ms": 100, "slo_itl_ms": 100,
    "spaces_between_special_tokens": True, "cache_control": {"type": "ephemeral"},
}
APIS = [pytest.param(api, id=api[1]) for api in table.REQUESTS]


def test_the_page_is_current():
    assert (ROOT / "docs" / "compatibility.md").read_text() == table.text(), "run scripts/gen_compatibility.py"


def value_of(name, schema):
    if name in VALUES:
        return VALUES[name]
    kind = table.document()["components"]["schemas"][schema]["properties"][name].get("type", ["boolean"])
    return {"boolean": True, "integer": 2, "number": 0.5}[kind[0] if isinstance(kind, list) else kind]


@pytest.mark.parametrize("api", APIS)
def test_fields_are_taken_refused_or_ignored(fake, api):
    path, schema = api[0].split()[1], api[1]
    for name, _, state, note in table.fields(api):
        if state in ("yes", "no effect"):
            value = value_of(name, schema)
            if schema == "EmbeddingRequest" and name in ("add_generation_prompt", "chat_template_kwargs"):
                continue  # of messages
            if value is None:  # tests of their own
                continue
        elif schema == "ResponsesRequest" and name == "prompt":
            value = {"id": "x"}
        else:
            value = "x"
        r = httpx.post(fake.url + path, json={**NEEDED[schema], name: value}, timeout=60)
        ignored = r.headers.get("X-NestedFP-Ignored", "").split(", ")
        if state == "refused":
            assert r.status_code == 400 and name in r.text and ("error" in r.json()), (name, r.text)
        elif state == "ignored":
            assert r.status_code == 200 and name in ignored, (name, r.text)
        else:
            assert r.status_code == 200 and name not in ignored, (name, note, r.text, ignored)


@pytest.mark.parametrize("api", APIS)
def test_no_field_is_known_and_not_in_the_table(fake, api):
    """Of all names in the sources of requests the server ignores, and so names, those that the table does not have."""
    path, schema = api[0].split()[1], api[1]
    names = {name for source in (ROOT / "src" / "server" / "api").glob("*.cc") for name in re.findall(r'"([a-z][a-z_0-9]+)"', source.read_text())}
    others = sorted(names - {name for name, *_ in table.fields(api)})
    assert len(others) > 100
    for some in (others[i:i + 16] for i in range(0, len(others), 16)):  # no answer names more
        r = httpx.post(fake.url + path, json={**NEEDED[schema], **dict.fromkeys(some)}, timeout=60)
        assert r.status_code == 200 and sorted(r.headers["X-NestedFP-Ignored"].split(", ")) == some, (some, r.headers)


def test_paths(fake):
    for method, path, _, note in table.ENDPOINTS:
        r = httpx.request(method, fake.url + path.replace("{id}", "fake"), json={} if method == "POST" else None)
        if note:
            assert r.status_code == int(note[:3]), (path, r.status_code)
            assert ("/v1/embeddings" in r.text) == ("says so" in note), path
            assert r.status_code != 405 or note[5:] in r.json()["error"]["message"], path
        else:
            assert r.status_code != 404 or "there is no such path" not in r.text, path


def test_what_needs_a_second_field(fake):
    """The fields that VALUES leaves out because of what they need."""
    chat = NEEDED["ChatRequest"]
    for body in ({"stream": True, "stream_options": {"include_usage": True}}, {"logprobs": True, "top_logprobs": 1}, {"prompt_logprobs": 0},
                 {"store": False}, {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"},
                 {"continue_final_message": True, "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "SAY:b"}]}):
        r = httpx.post(fake.url + "/v1/chat/completions", json={**chat, **body})
        assert r.status_code == 200 and "X-NestedFP-Ignored" not in r.headers, (body, r.text)
    for body in ({"store": True}, {"service_tier": "flex"}, {"modalities": ["audio"]}):
        r = httpx.post(fake.url + "/v1/chat/completions", json={**chat, **body})
        assert r.status_code == 400 and next(iter(body)) in r.text, body


def test_serving_md_leads_here():
    assert re.search(r"\]\(compatibility\.md\)", (ROOT / "docs" / "serving.md").read_text())
