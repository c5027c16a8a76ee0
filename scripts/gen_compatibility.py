#!/usr/bin/env python3
"""Writes docs/compatibility.md from src/server/openapi.json and what is below: gen_compatibility.py [--check]

--check writes nothing and fails where the file is not what would be written. tests/server/test_compatibility.py holds the
tables against a running server."""

import argparse
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

# package, what the tests do with it. Versions are those that tests/requirements*.txt pin.
CLIENTS = [
    ("openai", "chat, completions, responses, embeddings, tools, structured outputs, errors; asynchronous, 100 at a time"),
    ("openai-agents", "agents with tools over `/v1/responses`, whole and streamed"),
    ("anthropic", "`/v1/messages`, streams, tools, counting of tokens, errors, models"),
    ("litellm", "as `openai/` and `hosted_vllm/`: chat, streams, tools, embeddings, its own errors"),
    ("langchain-openai", "chat, streams, tools, batches, embeddings, structured output by schema and by function"),
    ("instructor", "models of pydantic by tools and by JSON schema"),
    ("pydantic-ai-slim", "agents with tools, streams, structured output"),
    ("llm", "the command: streamed, whole, a conversation that goes on"),
    ("guidellm", "a benchmark of concurrent requests, and what it reports of them"),
    ("lm_eval", "likelihoods and generated answers, one by one and in batches"),
    ("schemathesis", "requests made from `/openapi.json`"),
]

# path, as others have it, ours. The last is empty for paths that openapi.json has.
ENDPOINTS = [
    ("POST", "/v1/chat/completions", "OpenAI, vLLM", ""),
    ("POST", "/v1/completions", "OpenAI, vLLM", ""),
    ("POST", "/v1/responses", "OpenAI, vLLM", ""),
    ("POST", "/v1/responses/input_tokens", "OpenAI", ""),
    ("POST", "/v1/responses/compact", "OpenAI", "405: conversations are not compacted"),
    ("GET", "/v1/responses/{id}", "OpenAI, vLLM", ""),
    ("DELETE", "/v1/responses/{id}", "OpenAI", ""),
    ("GET", "/v1/responses/{id}/input_items", "OpenAI", ""),
    ("POST", "/v1/responses/{id}/cancel", "OpenAI, vLLM", "405: answers do not run in the background"),
    ("POST", "/v1/messages", "Anthropic, vLLM", ""),
    ("POST", "/v1/messages/count_tokens", "Anthropic", ""),
    ("POST", "/v1/embeddings", "OpenAI, vLLM", ""),
    ("GET", "/v1/models", "OpenAI, Anthropic, vLLM", ""),
    ("GET", "/v1/models/{id}", "OpenAI, Anthropic", ""),
    ("POST", "/tokenize", "vLLM", ""),
    ("POST", "/detokenize", "vLLM", ""),
    ("GET", "/tokenizer_info", "vLLM", ""),
    ("GET", "/health", "vLLM", ""),
    ("GET", "/ping", "vLLM", ""),
    ("GET", "/load", "vLLM", ""),
    ("GET", "/version", "vLLM", ""),
    ("GET", "/metrics", "vLLM", ""),
    ("POST", "/v1/rerank", "vLLM", "404 that says so: needs a model with a head for it"),
    ("POST", "/rerank", "vLLM", "404 that says so: needs a model with a head for it"),
    ("POST", "/v1/score", "vLLM", "404 that says so: needs a model with a head for it"),
    ("POST", "/score", "vLLM", "404 that says so: needs a model with a head for it"),
    ("POST", "/pooling", "vLLM", "404 that says so: needs a model with a head for it"),
    ("POST", "/classify", "vLLM", "404 that says so: needs a model with a head for it"),
    ("POST", "/v1/audio/transcriptions", "OpenAI, vLLM", "404: text only"),
    ("POST", "/v1/images/generations", "OpenAI", "404: text only"),
    ("POST", "/v1/moderations", "OpenAI", "404"),
    ("POST", "/v1/files", "OpenAI", "404"),
    ("POST", "/v1/batches", "OpenAI", "404"),
    ("POST", "/invocations", "vLLM", "404"),
    ("POST", "/v1/load_lora_adapter", "vLLM", "404: there is no LoRA"),
    ("POST", "/sleep", "vLLM", "404"),
]

SAMPLING = "frequency_penalty logit_bias presence_penalty seed stop temperature top_p"
COMMON_OPENAI = f"model n stream stream_options user metadata safety_identifier prompt_cache_key prompt_cache_retention {SAMPLING}"
COMMON_VLLM = """add_special_tokens allowed_token_ids bad_words cache_salt ignore_eos include_stop_str_in_output kv_transfer_params
 length_penalty logits_processors min_p min_tokens priority prompt_logprobs repetition_penalty request_id response_format
 return_token_ids return_tokens_as_token_ids skip_special_tokens spaces_between_special_tokens stop_token_ids structured_outputs
 top_k truncate_prompt_tokens truncation_side use_beam_search vllm_xargs guided_json guided_regex guided_choice guided_grammar
 guided_decoding_backend guided_whitespace_pattern"""

# Schema of openapi.json, and the fields that others have: (name, OpenAI's or Anthropic's, vLLM's besides).
REQUESTS = [
    ("POST /v1/chat/completions", "ChatRequest", "OpenAI",
     COMMON_OPENAI + """ messages max_tokens max_completion_tokens logprobs top_logprobs tools tool_choice parallel_tool_calls
     response_format reasoning_effort verbosity modalities store service_tier functions function_call audio prediction
     web_search_options""",
     COMMON_VLLM + """ add_generation_prompt continue_final_message chat_template chat_template_kwargs documents echo
     include_reasoning mm_processor_kwargs media_io_kwargs best_of prompt_embeds"""),
    ("POST /v1/completions", "CompletionRequest", "OpenAI",
     COMMON_OPENAI + " prompt max_tokens logprobs echo suffix best_of", COMMON_VLLM + " prompt_embeds mm_processor_kwargs"),
    ("POST /v1/responses", "ResponsesRequest", "OpenAI",
     """background conversation include input instructions max_output_tokens max_tool_calls metadata model parallel_tool_calls
     previous_response_id prompt prompt_cache_key prompt_cache_retention reasoning safety_identifier service_tier store stream
     stream_options temperature text tool_choice tools top_logprobs top_p truncation user""",
     """cache_salt priority top_k min_p repetition_penalty seed stop stop_token_ids ignore_eos min_tokens skip_special_tokens
     include_stop_str_in_output request_id"""),
    ("POST /v1/messages", "MessagesRequest", "Anthropic",
     """max_tokens messages model cache_control compaction container context_management mcp_servers metadata output_config
     output_format service_tier stop_sequences stream system temperature thinking thread tool_choice tools top_k top_p""", ""),
    ("POST /v1/embeddings", "EmbeddingRequest", "OpenAI",
     "input model dimensions encoding_format user",
     """add_special_tokens add_generation_prompt cache_salt chat_template chat_template_kwargs continue_final_message embed_dtype
     endianness messages normalize priority request_id truncate_prompt_tokens
     truncation_side mm_processor_kwargs"""),
]

# Fields that are an error when they ask for something, and why.
REFUSED = {
    "ChatRequest": {
        "functions": "use `tools`", "function_call": "use `tool_choice`", "audio": "text only",
        "prediction": "not implemented", "web_search_options": "not implemented",
        "chat_template": "the server's flag `--chat-template` chooses it", "media_io_kwargs": "text only",
        "mm_processor_kwargs": "text only", "best_of": "use `n`", "prompt_embeds": "not implemented"},
    "CompletionRequest": {
        "suffix": "needs a model trained to insert text", "prompt_embeds": "not implemented", "mm_processor_kwargs": "text only"},
    "ResponsesRequest": {
        "background": "answers do not run in the background", "conversation": "use `previous_response_id`",
        "prompt": "not implemented"},
    "MessagesRequest": {
        "container": "no tool runs here", "mcp_servers": "no tool runs here", "context_management": "but for edits that keep all",
        "compaction": "conversations are not compacted", "output_format": "use `output_config.format`",
        "thread": "messages are not kept; Anthropic's packages then send whole conversations"},
    "EmbeddingRequest": {
        "chat_template": "the server's flag `--chat-template` chooses it", "mm_processor_kwargs": "text only"},
}
REFUSED_IN_TEXT = {name: "not implemented" for name in (
    "logits_processors", "kv_transfer_params", "vllm_xargs", "guided_decoding_backend", "guided_whitespace_pattern")} | {"use_beam_search": "there is no beam search"}
# Fields of others than OpenAI, Anthropic and vLLM.
OTHERS = {"grammar": "llama.cpp", "json_schema": "llama.cpp"}
# Fields that openapi.json has and that do less than elsewhere, and what.
NOTES = {
    ("ChatRequest", "store"): "only false: answers are not kept",
    ("ChatRequest", "service_tier"): "only auto and default",
    ("ResponsesRequest", "service_tier"): "only auto and default",
    ("ChatRequest", "modalities"): 'only `["text"]`',
}


def document():
    return json.loads((ROOT / "src" / "server" / "openapi.json").read_text())


def refused(schema):
    """Fields that the server refuses by name: {name: reason}."""
    common = REFUSED_IN_TEXT if schema in ("ChatRequest", "CompletionRequest") else {}
    return {**common, **REFUSED[schema]}


def fields(api):
    """[(name, whose, state, note)] of one request; state: yes, no effect, refused, ignored."""
    _, schema, owner, theirs, vllm = api
    properties = document()["components"]["schemas"][schema]["properties"]
    theirs, vllm = theirs.split(), vllm.split()
    rows = []
    for name in [*dict.fromkeys(theirs + vllm + list(properties))]:
        whose = owner if name in theirs else "vLLM" if name in vllm else OTHERS.get(name, "nestedfp")
        if name in refused(schema):
            state, note = "refused", refused(schema)[name]
        elif name in properties:
            note = properties[name].get("description", "")
            state = "no effect" if note.startswith("No effect") else "yes"
            note = "" if state == "no effect" else NOTES.get((schema, name), note)
        else:
            state, note = "ignored", ""
        rows.append((name, whose, state, note))
    return rows


def text():
    document_paths = document()["paths"]
    out = ["# Compatibility", "",
           "What of OpenAI's, Anthropic's and vLLM's interfaces is here, path by path and field by field. This page is made from",
           "`src/server/openapi.json` by `scripts/gen_compatibility.py`; tests hold it against the running server.",
           "[serving.md](serving.md) explains the rest.", "",
           "- *yes*: it does what it does there.",
           "- *no effect*: accepted, and nothing follows from it.",
           "- *refused*: 400 with an error that names it, where it asks for something (null, false, 0, \"\" and empty lists do not).",
           "- *ignored*: the answer names it in the header `X-NestedFP-Ignored`; 400 with `--strict-requests`.", "",
           "The column *of* says whose field it is: *vLLM* what vLLM adds, *llama.cpp* what its server adds, *nestedfp* what we add", "to this request.", "",
           "## Paths", "", "| path | also in | here |", "| --- | --- | --- |"]
    listed = set()
    for method, path, whose, note in ENDPOINTS:
        listed.add((method.lower(), path))
        there = method.lower() in document_paths.get(path, {})
        assert there == (not note), f"{method} {path}: openapi.json and the table differ"
        out.append(f"| {method} `{path}` | {whose} | {note or 'yes'} |")
    for path, methods in document_paths.items():
        for method in methods:
            if (method, path) not in listed:
                out.append(f"| {method.upper()} `{path}` | | {methods[method]['summary'].rstrip('.')} |")
    for api in REQUESTS:
        out += ["", f"## {api[0]}", "", "| field | of | here | |", "| --- | --- | --- | --- |"]
        for name, whose, state, note in fields(api):
            note = note.replace("|", "\\|").replace("\n", " ")
            out.append(f"| `{name}` | {whose} | {state} | {note} |")
    return "\n".join(out + clients()) + "\n"


def clients():
    """Table of CLIENTS."""
    pins = {}
    for path in sorted((ROOT / "tests").glob("requirements*.txt")):
        pins.update(re.findall(r"^([\w.-]+)==(\S+)$", path.read_text(), re.M))
    return ["", "## Packages", "", "These run against the server unmodified in `scripts/test`, over a fake model that says what it is told to",
            "and over the demo model (guidellm and schemathesis over the first alone, lm_eval over the second).",
            "[serving.md](serving.md#measuring-and-testing) says what was tried by hand.", "",
            "| package | version | what is tried |", "| --- | --- | --- |",
            *(f"| `{name}` | {pins[name]} | {what} |" for name, what in CLIENTS)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    path = ROOT / "docs" / "compatibility.md"
    if not arguments.check:
        path.write_text(text())
    elif not path.exists() or path.read_text() != text():
        sys.exit("docs/compatibility.md is not current: run scripts/gen_compatibility.py")


if __name__ == "__main__":
    main()
