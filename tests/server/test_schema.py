"""schemathesis makes requests from /openapi.json: no server error, and every response as the document says."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import httpx
import pytest

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


# Short answers: a reader that is slower than this server is cut off from long ones.
@pytest.fixture
def server(launch):
    if importlib.util.find_spec("schemathesis") is None:
        pytest.skip("schemathesis is not installed")
    return launch("--max-queue", 100000, "--max-num-seqs", 512, "--max-model-len", 512)


def run_schemathesis(server, document, seed, phases):
    program = os.path.join(os.path.dirname(sys.executable), "st")
    run = subprocess.run(
        [program, "run", document, "--url", server.url, "--checks", CHECKS, "--phases", phases,
         "--max-examples", os.environ.get("NFP_SCHEMATHESIS_EXAMPLES", "40"), "--seed", str(seed),
         "--generation-database", "none",  # whose upkeep takes half of the time, and which makes a run depend on those before
         "--request-timeout", "60", "--no-color"],
        capture_output=True, text=True, timeout=850, cwd=os.environ["NFP_TEST_OUT"])
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert server.process.poll() is None


# Only fuzzing goes by the seed.
@pytest.mark.parametrize("seed,phases", [(1, "examples,coverage,fuzzing"), (2, "fuzzing")])
def test_schemathesis(server, seed, phases):
    run_schemathesis(server, server.url + "/openapi.json", seed, phases)


# What a document cannot say makes most random requests refused: fields that exclude or need each other, roles in order,
# grammars that are none. Without these fields most are answered.
GENERATING = {"/v1/chat/completions": ("ChatRequest", "max_tokens"), "/v1/completions": ("CompletionRequest", "max_tokens"),
              "/v1/responses": ("ResponsesRequest", "max_output_tokens"), "/v1/messages": ("MessagesRequest", "max_tokens")}
EXCLUDING = {"guided_json", "guided_regex", "guided_grammar", "guided_choice", "grammar", "json_schema", "structured_outputs", "response_format", "text",
             "output_config", "output_format", "min_tokens", "top_logprobs", "prompt_logprobs", "stream_options",
             "chat_template_kwargs", "continue_final_message", "tool_choice", "stop_token_ids", "allowed_token_ids", "background", "best_of",
             "max_completion_tokens"}


def narrowed(document):
    schemas = document["components"]["schemas"]
    document["paths"] = {path: {"post": document["paths"][path]["post"]} for path in GENERATING}
    for name, limit in GENERATING.values():
        schema = schemas[name]
        fields = schema["properties"] = {k: v for k, v in schema["properties"].items() if k not in EXCLUDING}
        fields[limit] = {"type": "integer", "minimum": 1, "maximum": 6}
        if "n" in fields:
            fields["n"] = {"type": "integer", "minimum": 1, "maximum": 3}
        schema["required"] = sorted({*schema.get("required", []), limit, *({"input"} & fields.keys())})
        schema["additionalProperties"] = False
    items = schemas["ResponsesRequest"]["properties"]["input"]["anyOf"][1]["items"]
    items["anyOf"] = [item for item in items["anyOf"] if item["properties"]["type"]["const"] != "item_reference"]  # of nothing that is kept
    text = {"type": "string", "maxLength": 60}
    schemas["Message"] = {"type": "object", "required": ["role", "content"], "additionalProperties": False, "properties": {
        "role": {"enum": ["user", "assistant", "system"]}, "content": text, "name": text, "reasoning_content": text}}
    return document


def test_requests_that_are_answered(server):
    document = os.path.join(os.environ["NFP_TEST_OUT"], "narrowed.json")
    with open(document, "w", encoding="utf-8") as file:
        json.dump(narrowed(httpx.get(server.url + "/openapi.json").json()), file)
    run_schemathesis(server, document, 3, "fuzzing")
    counted = {(path, status): int(count) for path, status, count in re.findall(
        r'http_requests_total\{handler="([^"]*)",method="POST",status="(.xx)"\} (\d+)', server.metrics())}
    for path in GENERATING:
        answered, refused = (counted.get((path, status), 0) for status in ("2xx", "4xx"))
        assert answered > refused, f"{path}: {answered} answered, {refused} refused"
