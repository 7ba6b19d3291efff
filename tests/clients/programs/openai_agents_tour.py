"""OpenAI's agents: a runner that calls a tool, over chat completions and over the Responses API."""

from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.agent_output import AgentOutputSchema
from openai import AsyncOpenAI, BadRequestError
from pydantic import BaseModel, ConfigDict
from steps import BASE, KEY, LONG, MODEL, REAL, SUM, answered, raises, run, step

set_tracing_disabled(True)


class Verdict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    is_right: bool


@function_tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return "sunny"


def each_model():
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        yield kind(model=MODEL, openai_client=AsyncOpenAI(base_url=BASE, api_key=KEY, max_retries=0))


@step()
async def chat():
    for model in each_model():
        agent = Agent("one", model=model, model_settings=ModelSettings(temperature=0, max_tokens=200))
        answered((await Runner.run(agent, SUM)).final_output)


@step()
async def conversation():
    """What the first run said is the second one's input."""
    for model in each_model():
        agent = Agent("one", model=model, model_settings=ModelSettings(temperature=0, max_tokens=200))
        first = await Runner.run(agent, SUM)
        second = await Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": SUM}])
        assert second.final_output


@step("scripted")
async def tool_round_trip():
    for model in each_model():
        agent = Agent("one", model=model, tools=[weather])
        assert (await Runner.run(agent, "How is Paris?")).final_output == "It is sunny in Paris."


@step("scripted")
async def streamed_round_trip():
    for model in each_model():
        agent = Agent("one", model=model, tools=[weather])
        result = Runner.run_streamed(agent, "How is Paris?")
        kinds = [event.item.type async for event in result.stream_events() if event.type == "run_item_stream_event"]
        assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"], kinds
        assert result.final_output == "It is sunny in Paris."


@step(*REAL)
async def forced_tool():
    for model in each_model():
        for choice in ("required", "weather"):
            agent = Agent("one", model=model, tools=[weather], model_settings=ModelSettings(tool_choice=choice),
                          tool_use_behavior="stop_on_first_tool")  # fmt: skip
            assert (await Runner.run(agent, SUM)).final_output == "sunny"


@step(*REAL)
async def structure():
    for model in each_model():
        agent = Agent("one", model=model, output_type=AgentOutputSchema(Verdict))
        assert isinstance((await Runner.run(agent, SUM)).final_output, Verdict)


@step()
async def overflow():
    for model in each_model():
        with raises(BadRequestError, "context_length_exceeded"):
            await Runner.run(Agent("one", model=model), LONG)


run()
