"""langchain-openai: chat, tools, structure in its three ways, embeddings, the Responses API."""

from typing import Literal

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from openai import BadRequestError
from pydantic import BaseModel, ConfigDict
from steps import (
    ABORTED,
    BASE,
    KEY,
    LONG,
    MODEL,
    REAL,
    SUM,
    answered,
    is_city,
    metric,
    raises,
    run,
    step,
    wait_for_an_abort,
)

WHERE = {"model": MODEL, "base_url": BASE, "api_key": KEY, "max_retries": 0}
llm = ChatOpenAI(**WHERE, temperature=0, max_tokens=200)


class Verdict(BaseModel):
    """Whether it is right."""

    model_config = ConfigDict(extra="forbid")
    is_right: bool


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return "sunny"


@step()
def chat():
    answer = llm.invoke(SUM)
    answered(answer.content)
    assert answer.usage_metadata["output_tokens"] > 0


@step()
def stream():
    whole = llm.invoke(SUM).content
    assert "".join(chunk.content for chunk in llm.stream(SUM)) == whole


@step()
async def batches():
    for answer in await llm.abatch([SUM, SUM]):
        answered(answer.content)


@step(*REAL)
def forced_tool():
    for choice in ("weather", "any"):
        bound = llm.bind_tools([weather], tool_choice=choice, strict=True)
        (call,) = bound.invoke(SUM).tool_calls
        assert call["name"] == "weather"
        assert isinstance(call["args"]["city"], str)
    whole = None
    for chunk in llm.bind_tools([weather], tool_choice="weather", strict=True).stream(SUM):
        whole = chunk if whole is None else whole + chunk
    assert whole.tool_calls[0]["name"] == "weather"


@step("scripted")
def tool_round_trip():
    bound = llm.bind_tools([weather])
    messages = [HumanMessage("How is Paris?")]
    first = bound.invoke(messages)
    (call,) = first.tool_calls
    is_city(call["args"])
    messages += [first, weather.invoke(call)]
    assert isinstance(messages[-1], ToolMessage)
    assert bound.invoke(messages).content == "It is sunny in Paris."


@step()
def an_answer_sent_back():
    first = llm.invoke(SUM)
    assert llm.invoke([HumanMessage(SUM), first, HumanMessage(SUM)]).content


@step(*REAL)
def structure():
    for method in ("json_schema", "function_calling"):
        found = llm.with_structured_output(Verdict, method=method).invoke(SUM)
        assert isinstance(found, Verdict), (method, found)


@step("scripted")
def structure_by_instruction():
    found = llm.with_structured_output(Verdict, method="json_mode").invoke("JSON please.")
    assert isinstance(found, Verdict), found


@step(*REAL)
def responses():
    model = ChatOpenAI(**WHERE, temperature=0, max_tokens=200, use_responses_api=True)
    answered(model.invoke(SUM).text)
    assert "".join(chunk.text for chunk in model.stream(SUM)) == model.invoke(SUM).text
    (call,) = model.bind_tools([weather], tool_choice="weather", strict=True).invoke(SUM).tool_calls
    assert call["name"] == "weather"


@step(*REAL)
def embeddings():
    model = OpenAIEmbeddings(**WHERE, check_embedding_ctx_length=False)
    first, second = model.embed_documents(["one", "two"])
    assert len(first) == len(second) == len(model.embed_query("three"))


@step(*REAL)
def completion():
    assert OpenAI(**WHERE, max_tokens=4, temperature=0).invoke("Once")


@step()
def overflow():
    with raises(ContextOverflowError):
        llm.invoke(LONG)


@step()
def errors():
    with raises(BadRequestError, "temperature"):
        llm.bind(temperature=-3).invoke(SUM)


@step(*REAL)
def a_closed_stream():
    before = metric(*ABORTED)
    model = ChatOpenAI(**WHERE, max_tokens=1500, extra_body={"ignore_eos": True})
    stream = model.stream(SUM)
    next(stream)
    stream.close()
    wait_for_an_abort(before)


run()
