"""Haystack: its chat generators for both APIs, embedders, and an agent that calls a tool."""

from typing import Literal

from haystack.components.agents import Agent
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage, Document
from haystack.tools import tool
from haystack.utils import Secret
from openai import BadRequestError
from pydantic import BaseModel, ConfigDict
from steps import BASE, KEY, LONG, MODEL, REAL, SUM, answered, raises, run, step

WHERE = {"model": MODEL, "api_base_url": BASE, "api_key": Secret.from_token(KEY), "max_retries": 0}
HELLO = [ChatMessage.from_user(SUM)]


class Verdict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    is_right: bool


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return "sunny"


def ask(messages=HELLO, component=OpenAIChatGenerator, **fields):
    settings = {"temperature": 0, **fields.pop("generation_kwargs", {})}
    made = component(**WHERE, generation_kwargs=settings, **fields)
    return made.run(messages)["replies"][0]


@step()
def chat():
    answered(ask().text)
    answered(ask(component=OpenAIResponsesChatGenerator).text)


@step()
def stream():
    pieces = []
    whole = ask(streaming_callback=lambda chunk: pieces.append(chunk.content)).text
    assert "".join(pieces) == whole == ask().text


@step(*REAL)
def forced_tool():
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        (call,) = ask(tools=[weather], tools_strict=True, generation_kwargs={"tool_choice": choice}).tool_calls
        assert call.tool_name == "weather"


@step("scripted")
def tool_round_trip():
    for component in (OpenAIChatGenerator, OpenAIResponsesChatGenerator):
        agent = Agent(chat_generator=component(**WHERE), tools=[weather])
        said = agent.run(messages=[ChatMessage.from_user("How is Paris?")])["messages"]
        assert said[-1].text == "It is sunny in Paris."


@step()
def an_answer_sent_back():
    assert ask([*HELLO, ask(), *HELLO]).text


@step(*REAL)
def structure():
    Verdict.model_validate_json(ask(generation_kwargs={"response_format": Verdict}).text)


@step(*REAL)
def embeddings():
    assert OpenAITextEmbedder(**WHERE).run("one")["embedding"]
    assert OpenAIDocumentEmbedder(**WHERE, progress_bar=False).run([Document(content="one")])["documents"][0].embedding


@step()
def overflow():
    with raises(BadRequestError, "context_length_exceeded"):
        ask([ChatMessage.from_user(LONG)])


run()
