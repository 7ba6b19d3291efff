"""AutoGen's OpenAIChatCompletionClient, and an assistant agent that calls a tool."""

from typing import Literal

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import AssistantMessage, CreateResult, ModelInfo, UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from openai import BadRequestError
from pydantic import BaseModel, ConfigDict
from steps import BASE, KEY, LONG, MODEL, REAL, SUM, answered, raises, run, step

INFO = ModelInfo(vision=False, function_calling=True, json_output=True, family="unknown", structured_output=True)
HELLO = [UserMessage(content=SUM, source="user")]


class Verdict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    is_right: bool


async def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return "sunny"


def make():
    return OpenAIChatCompletionClient(
        model=MODEL, base_url=BASE, api_key=KEY, model_info=INFO, max_retries=0, temperature=0, max_tokens=200
    )


@step()
async def chat():
    answered((await make().create(HELLO)).content)


@step()
async def stream():
    parts = [each async for each in make().create_stream(HELLO)]
    assert isinstance(parts[-1], CreateResult)
    assert "".join(each for each in parts[:-1]) == parts[-1].content


@step(*REAL)
async def forced_tool():
    tool = FunctionTool(weather, description="The weather of a city.", strict=True)
    for choice in ("required", tool):
        (call,) = (await make().create(HELLO, tools=[tool], tool_choice=choice)).content
        assert call.name == "weather"


@step("scripted")
async def tool_round_trip():
    agent = AssistantAgent("one", model_client=make(), tools=[weather], reflect_on_tool_use=True)
    result = await agent.run(task="How is Paris?")
    assert result.messages[-1].content == "It is sunny in Paris."


@step()
async def an_answer_sent_back():
    said = AssistantMessage(content=(await make().create(HELLO)).content, source="one")
    assert (await make().create([*HELLO, said, *HELLO])).content


@step(*REAL)
async def structure():
    Verdict.model_validate_json((await make().create(HELLO, json_output=Verdict)).content)


@step()
async def overflow():
    with raises(BadRequestError, "context_length_exceeded"):
        await make().create([UserMessage(content=LONG, source="user")])


run()
