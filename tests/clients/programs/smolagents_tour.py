"""smolagents: its OpenAI model, an agent that calls tools, and one that writes code."""

from openai import BadRequestError
from smolagents import ChatMessage, CodeAgent, OpenAIModel, ToolCallingAgent, tool
from steps import BASE, KEY, LONG, MODEL, REAL, SUM, answered, raises, run, step

model = OpenAIModel(
    MODEL, api_base=BASE, api_key=KEY, temperature=0, max_tokens=200, client_kwargs={"max_retries": 0}, retry=False
)


def said(text):
    return [ChatMessage(role="user", content=[{"type": "text", "text": text}])]


@tool
def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    return "sunny"


@step()
def chat():
    answered(model.generate(said(SUM)).content)


@step()
def stream():
    text = "".join(each.content or "" for each in model.generate_stream(said(SUM)))
    assert text == model.generate(said(SUM)).content


@step(*REAL)
def forced_tool():
    (call,) = model.generate(said(SUM), tools_to_call_from=[weather]).tool_calls
    assert call.function.name == "weather"


@step("scripted")
def tool_round_trip():
    agent = ToolCallingAgent(tools=[weather], model=model, max_steps=3, verbosity_level=0)
    assert agent.run("How is Paris?") == "It is sunny in Paris."


@step("scripted")
def code_agent():
    agent = CodeAgent(tools=[], model=model, max_steps=2, verbosity_level=0)
    assert agent.run("Write the code that ends the task.") == "It is sunny in Paris."


@step()
def overflow():
    with raises(BadRequestError, "context_length_exceeded"):
        model.generate(said(LONG))


run()
