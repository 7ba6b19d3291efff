"""pydantic-ai: agents over chat completions and over the Responses API, with tools and three ways to a structure."""

from typing import Literal

from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.embeddings import Embedder
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from steps import BASE, KEY, LONG, MODEL, REAL, SUM, answered, raises, run, step

provider = OpenAIProvider(base_url=BASE, api_key=KEY)
SETTINGS = {"temperature": 0, "max_tokens": 200}


class Verdict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    is_right: bool


def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return "sunny"


def each_model():
    yield OpenAIChatModel(MODEL, provider=provider)
    yield OpenAIResponsesModel(MODEL, provider=provider)


@step()
async def chat():
    for model in each_model():
        answered((await Agent(model, model_settings=SETTINGS).run(SUM)).output)


@step()
async def stream():
    for model in each_model():
        agent = Agent(model, model_settings=SETTINGS)
        async with agent.run_stream(SUM) as result:
            text = "".join([piece async for piece in result.stream_text(delta=True, debounce_by=None)])
        assert text == (await agent.run(SUM)).output


@step()
async def conversation():
    """What the first run said is the second one's history."""
    for model in each_model():
        agent = Agent(model, model_settings=SETTINGS)
        first = await agent.run(SUM)
        assert (await agent.run(SUM, message_history=first.all_messages())).output


@step("scripted")
async def tool_round_trip():
    for model in each_model():
        agent = Agent(model, tools=[weather])
        assert (await agent.run("How is Paris?")).output == "It is sunny in Paris."


@step(*REAL)
async def structure():
    for model in each_model():
        for kind in (NativeOutput(Verdict), ToolOutput(Verdict)):
            agent = Agent(model, output_type=kind, model_settings=SETTINGS)
            assert isinstance((await agent.run(SUM)).output, Verdict), kind


@step(*REAL)
async def embeddings():
    from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel

    embedder = Embedder(OpenAIEmbeddingModel(MODEL, provider=provider))
    assert len((await embedder.embed_documents(["one", "two"])).embeddings) == 2


@step()
async def overflow():
    for model in each_model():
        with raises(ModelHTTPError, "context_length_exceeded"):
            await Agent(model).run(LONG)


run()
