"""Packages that people put between themselves and a server, unmodified: litellm, langchain-openai, instructor, pydantic-ai,
llm and guidellm. tests/requirements-clients.txt pins them; one that is not installed is skipped."""

import asyncio
import json
import os
import subprocess
import sys

import httpx
import pytest

pytestmark = pytest.mark.usefixtures("quiet")
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


def have_grammars(server):
    if not httpx.get(server.url + "/v1/models").json()["data"][0]["grammars"]:
        pytest.skip("built without xgrammar (scripts/build-xgrammar)")


def say(text):
    return [{"role": "user", "content": "SAY:" + text}]


# --- litellm


@pytest.fixture(scope="module")
def litellm(fake):
    module = pytest.importorskip("litellm")
    module.telemetry = False
    module.suppress_debug_info = True

    def call(function, **more):
        model = more.pop("model", "openai/fake")
        return getattr(module, function)(model=model, api_base=fake.url + "/v1", api_key="none", num_retries=0, **more)
    return call


def test_litellm(litellm):
    r = litellm("completion", messages=say("Grüße"), temperature=0)
    assert r.choices[0].message.content == "Grüße" and r.usage.completion_tokens == 8
    streamed = litellm("completion", messages=say("a stream"), stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in streamed) == "a stream"
    r = litellm("completion", model="hosted_vllm/fake", messages=say("as vLLM"), extra_body={"top_k": 5})
    assert r.choices[0].message.content == "as vLLM"
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]
    r = litellm("completion", messages=say(CALL), tools=tools)
    assert json.loads(r.choices[0].message.tool_calls[0].function.arguments) == {"city": "Paris"}
    r = litellm("embedding", input=["abc", "x"], encoding_format="float")
    assert len(r.data) == 2 and len(r.data[0]["embedding"]) == 8


def test_litellm_errors_are_its_own(litellm):
    import litellm as module
    with pytest.raises(module.ContextWindowExceededError):
        litellm("completion", messages=say("x" * 5000))
    with pytest.raises(module.NotFoundError):
        litellm("completion", model="openai/other", messages=say("x"))


# --- langchain-openai


def test_langchain(fake):
    lc = pytest.importorskip("langchain_openai")
    model = lc.ChatOpenAI(model="fake", base_url=fake.url + "/v1", api_key="none", max_retries=0, temperature=0)
    answer = model.invoke("SAY:hello")
    assert answer.content == "hello" and answer.usage_metadata["output_tokens"] == 6
    assert "".join(c.content for c in model.stream("SAY:in pieces")) == "in pieces"
    tool = {"type": "function", "function": {"name": "weather", "description": "Weather of a city", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
    calls = model.bind_tools([tool]).invoke("SAY:" + CALL).tool_calls
    assert calls[0]["name"] == "weather" and calls[0]["args"] == {"city": "Paris"}
    assert [a.content for a in model.batch([f"SAY:{i}" for i in range(9)])] == [str(i) for i in range(9)]

    async def later():
        return (await model.ainvoke("SAY:later")).content
    assert asyncio.run(later()) == "later"


def test_langchain_embeddings(fake):
    lc = pytest.importorskip("langchain_openai")
    # It counts tokens with OpenAI's tokenizer and sends their ids, unless it is told not to.
    embeddings = lc.OpenAIEmbeddings(model="fake", base_url=fake.url + "/v1", api_key="none", check_embedding_ctx_length=False)
    vectors = embeddings.embed_documents([f"text {i}" for i in range(70)])
    assert len(vectors) == 70 and all(len(v) == 8 for v in vectors)
    assert embeddings.embed_query("text 3") == vectors[3]


def test_langchain_structured(fake):
    have_grammars(fake)
    lc = pytest.importorskip("langchain_openai")
    from pydantic import BaseModel, Field

    class Person(BaseModel):
        age: int = Field(ge=0, le=99)
    model = lc.ChatOpenAI(model="fake", base_url=fake.url + "/v1", api_key="none", max_retries=0, max_tokens=60)
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(Person, method=method).invoke("x"), Person), method


# --- instructor


def test_instructor(fake):
    have_grammars(fake)
    instructor = pytest.importorskip("instructor")
    import openai
    from pydantic import BaseModel, Field

    class Person(BaseModel):
        age: int = Field(ge=0, le=99)
    # The last one asks for a function and for text in the form of its arguments.
    for mode, most in ((instructor.Mode.TOOLS, "max_tokens"), (instructor.Mode.JSON_SCHEMA, "max_tokens"),
                       (instructor.Mode.RESPONSES_TOOLS, "max_output_tokens")):
        client = instructor.from_openai(openai.OpenAI(base_url=fake.url + "/v1", api_key="none", max_retries=0), mode=mode)
        answer = client.chat.completions.create(model="fake", response_model=Person, max_retries=0, **{most: 60},
                                                messages=[{"role": "user", "content": "How old is he?"}])
        assert isinstance(answer.age, int), mode


# --- pydantic-ai


def agent(fake, **more):
    pytest.importorskip("pydantic_ai")
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
    return Agent(OpenAIChatModel("fake", provider=OpenAIProvider(base_url=fake.url + "/v1", api_key="none")), **more)


def test_pydantic_ai(fake):
    result = agent(fake).run_sync("SAY:hello")
    assert result.output == "hello"
    called = []
    helper = agent(fake)

    @helper.tool_plain
    def weather(city: str) -> str:
        """Weather of a city."""
        called.append(city)
        return "SAY:sunny"
    assert helper.run_sync("SAY:" + CALL).output == "sunny" and called == ["Paris"]

    async def streamed():
        async with agent(fake).run_stream("SAY:in pieces") as answer:
            return await answer.get_output()
    assert asyncio.run(streamed()) == "in pieces"


def test_pydantic_ai_structured(fake):
    have_grammars(fake)
    pytest.importorskip("pydantic_ai")
    from pydantic import BaseModel, Field
    from pydantic_ai import NativeOutput

    class Person(BaseModel):
        age: int = Field(ge=0, le=99)
    assert isinstance(agent(fake, output_type=NativeOutput(Person)).run_sync("x", model_settings={"max_tokens": 60}).output, Person)


# --- llm


def test_llm_command(fake, tmp_path):
    pytest.importorskip("llm")
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: local\n  model_name: fake\n  api_base: {fake.url}/v1\n  can_stream: true\n")
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path)}

    def run(*arguments):
        r = subprocess.run([sys.executable, "-m", "llm", *arguments], env=environment, capture_output=True, text=True, timeout=120)
        assert r.returncode == 0, r.stderr[-2000:]
        return r.stdout.strip()
    assert run("-m", "local", "SAY:from a command") == "from a command"
    assert run("-m", "local", "--no-stream", "-o", "temperature", "0", "SAY:whole") == "whole"
    assert run("-c", "SAY:and on") == "and on"  # the conversation goes on


# --- guidellm


def test_guidellm(fake, tmp_path):
    pytest.importorskip("guidellm")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    # It makes prompts of so many tokens with the model's tokenizer: here a token is a byte.
    bytewise = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    bytewise.pre_tokenizer, bytewise.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bytewise.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    report = tmp_path / "report.json"
    run = subprocess.run([sys.executable, "-m", "guidellm", "benchmark", "run", "--target", fake.url, "--rate-type", "concurrent",
                          "--rate", "4", "--max-requests", "12", "--data", "prompt_tokens=100,output_tokens=16", "--processor", tmp_path,
                          "--output-path", report, "--disable-progress"], env={**os.environ, "HF_HUB_OFFLINE": "1"},
                         capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-1000:] + run.stderr[-3000:]
    figures = json.loads(report.read_text())["benchmarks"][0]
    assert figures["request_totals"] == {"successful": 12, "errored": 0, "incomplete": 0, "total": 12}
    metrics = {name: figures["metrics"][name]["successful"] for name in ("prompt_token_count", "output_token_count", "time_to_first_token_ms",
                                                                         "request_latency")}
    assert metrics["output_token_count"]["min"] == metrics["output_token_count"]["max"] == 16
    assert 100 <= metrics["prompt_token_count"]["min"] and metrics["prompt_token_count"]["max"] < 200  # and the chat template's
    assert 0 < metrics["time_to_first_token_ms"]["median"] <= 1000 * metrics["request_latency"]["max"]
