"""The packages of requirements-clients.txt, unmodified, ask `nestedfp serve` on the demo model what it knows. What they make of
every form of answer is tested over the fake model, which says what it is told to."""

import asyncio
import json
import os
import subprocess
import sys
from typing import Annotated

import openai
import pytest
from pydantic import BaseModel, Field

pytestmark = pytest.mark.usefixtures("quiet")
QUESTION = "What is the capital of France?"
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"], "additionalProperties": False}


class Guess(BaseModel):
    age: int = Field(ge=0, le=99)


@pytest.fixture(scope="module")
def client(real):
    return openai.OpenAI(base_url=real.url + "/v1", api_key="none", max_retries=0, timeout=300)


@pytest.fixture(scope="module")
def grammars(client):
    if not client.models.list().data[0].model_extra["grammars"]:
        pytest.skip("built without xgrammar (scripts/build-xgrammar)")


def test_responses(client):
    first = client.responses.create(model="demo", input=QUESTION, max_output_tokens=40, temperature=0)
    assert "Paris" in first.output_text
    second = client.responses.create(model="demo", input="And of Italy?", previous_response_id=first.id, max_output_tokens=40, temperature=0)
    assert "Rome" in second.output_text
    # The second turn holds the first, and finds its beginning in the prefix cache.
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    assert second.usage.input_tokens_details.cached_tokens >= 16
    with client.responses.stream(model="demo", input=QUESTION, max_output_tokens=40, temperature=0) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text and "Paris" in text


def test_responses_structured_and_tools(client, grammars):
    r = client.responses.create(model="demo", input=QUESTION, max_output_tokens=60, temperature=0, text={
        "format": {"type": "json_schema", "name": "answer", "schema": CITY, "strict": True}})
    assert list(json.loads(r.output_text)) == ["city"]
    tool = {"type": "function", "name": "weather", "description": "Weather of a city", "parameters": CITY, "strict": True}
    r = client.responses.create(model="demo", input="How is the weather in Oslo?", tools=[tool], tool_choice="required",
                                max_output_tokens=90, temperature=0)
    assert r.output[0].type == "function_call" and list(json.loads(r.output[0].arguments)) == ["city"]


def test_anthropic(real):
    anthropic = pytest.importorskip("anthropic")
    claude = anthropic.Anthropic(base_url=real.url, api_key="none", max_retries=0)
    request = {"model": "demo", "system": "Answer in one sentence.", "messages": [{"role": "user", "content": QUESTION}]}
    greedy = {"temperature": 0}  # the package's own argument is gone
    r = claude.messages.create(**request, max_tokens=40, extra_body=greedy)
    assert "Paris" in r.content[0].text and r.stop_reason in ("end_turn", "max_tokens")
    assert claude.messages.count_tokens(**request).input_tokens == r.usage.input_tokens + r.usage.cache_read_input_tokens
    with claude.messages.stream(**request, max_tokens=40, extra_body=greedy) as stream:
        assert "Paris" in "".join(stream.text_stream)


def test_anthropic_tool(real, grammars):
    anthropic = pytest.importorskip("anthropic")
    claude = anthropic.Anthropic(base_url=real.url, api_key="none", max_retries=0)
    r = claude.messages.create(model="demo", max_tokens=90, tool_choice={"type": "any"}, extra_body={"temperature": 0},
                               tools=[{"name": "weather", "description": "Weather of a city", "input_schema": CITY}],
                               messages=[{"role": "user", "content": "How is the weather in Oslo?"}])
    assert r.stop_reason == "tool_use" and list(r.content[0].input) == ["city"]


def test_agents(real, grammars):
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    agents.set_default_openai_client(openai.AsyncOpenAI(base_url=real.url + "/v1", api_key="none"), use_for_tracing=False)
    asked = []

    @agents.function_tool
    def weather(city: Annotated[str, Field(max_length=20)]) -> str:
        """Weather of a city."""
        asked.append(city)
        return "sunny"
    settings = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=90)
    agent = agents.Agent(name="helper", instructions="Help.", tools=[weather], model="demo", model_settings=settings,
                         tool_use_behavior="stop_on_first_tool")
    assert asyncio.run(agents.Runner.run(agent, "How is the weather in Oslo?")).final_output == "sunny" and len(asked) == 1


def test_litellm(real):
    litellm = pytest.importorskip("litellm")
    litellm.telemetry = False
    for model in ("openai/demo", "hosted_vllm/demo"):
        arguments = {"model": model, "api_base": real.url + "/v1", "api_key": "none", "temperature": 0, "max_tokens": 40,
                     "messages": [{"role": "user", "content": QUESTION}]}
        assert "Paris" in litellm.completion(**arguments).choices[0].message.content
        assert "Paris" in "".join(c.choices[0].delta.content or "" for c in litellm.completion(**arguments, stream=True))


def test_langchain(real):
    lc = pytest.importorskip("langchain_openai")
    model = lc.ChatOpenAI(model="demo", base_url=real.url + "/v1", api_key="none", max_retries=0, temperature=0, max_tokens=40)
    assert "Paris" in model.invoke(QUESTION).content
    assert "Paris" in "".join(c.content for c in model.stream(QUESTION))
    vectors = lc.OpenAIEmbeddings(model="demo", base_url=real.url + "/v1", api_key="none",
                                  check_embedding_ctx_length=False).embed_documents(["a cat", "a kitten"])
    assert [len(v) for v in vectors] == [576, 576]


def test_structured_by_frameworks(real, grammars):
    lc = pytest.importorskip("langchain_openai")
    model = lc.ChatOpenAI(model="demo", base_url=real.url + "/v1", api_key="none", max_retries=0, temperature=0, max_tokens=60)
    assert isinstance(model.with_structured_output(Guess, method="json_schema").invoke("How old is he?"), Guess)
    instructor = pytest.importorskip("instructor")
    guess = instructor.from_openai(openai.OpenAI(base_url=real.url + "/v1", api_key="none"), mode=instructor.Mode.TOOLS)
    assert isinstance(guess.chat.completions.create(model="demo", response_model=Guess, max_retries=0, max_tokens=60, temperature=0,
                                                    messages=[{"role": "user", "content": "How old is he?"}]), Guess)


def test_pydantic_ai(real, grammars):
    pytest.importorskip("pydantic_ai")
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
    model = OpenAIChatModel("demo", provider=OpenAIProvider(base_url=real.url + "/v1", api_key="none"))
    settings = {"temperature": 0, "max_tokens": 60}
    assert "Paris" in Agent(model).run_sync(QUESTION, model_settings=settings).output
    assert isinstance(Agent(model, output_type=NativeOutput(Guess)).run_sync("How old is he?", model_settings=settings).output, Guess)


def test_llm_command(real, tmp_path):
    pytest.importorskip("llm")
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: local\n  model_name: demo\n  api_base: {real.url}/v1\n  can_stream: true\n")
    r = subprocess.run([sys.executable, "-m", "llm", "-m", "local", "-o", "temperature", "0", "-o", "max_tokens", "40", QUESTION],
                       env={**os.environ, "LLM_USER_PATH": str(tmp_path)}, capture_output=True, text=True, timeout=120)
    assert r.returncode == 0 and "Paris" in r.stdout, r.stderr[-2000:]
