"""LlamaIndex's OpenAILike: chat, streams, tools, structure, embeddings."""

import gc
from typing import Literal

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from openai import BadRequestError
from pydantic import BaseModel, ConfigDict
from steps import ABORTED, BASE, KEY, LONG, MODEL, REAL, SUM, answered, metric, raises, run, step, wait_for_an_abort

WHERE = {"model": MODEL, "api_base": BASE, "api_key": KEY, "max_retries": 0}
llm = OpenAILike(
    **WHERE, is_chat_model=True, is_function_calling_model=True, context_window=2000, max_tokens=200, temperature=0
)
HELLO = [ChatMessage(role="user", content=SUM)]


class Verdict(BaseModel):
    """Whether it is right."""

    model_config = ConfigDict(extra="forbid")
    is_right: bool


def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return "sunny"


TOOL = FunctionTool.from_defaults(weather)


@step()
def chat():
    answered(llm.chat(HELLO).message.content)


@step()
def stream():
    *_, last = llm.stream_chat(HELLO)
    assert last.message.content == llm.chat(HELLO).message.content


@step(*REAL)
def completion():
    plain = OpenAILike(**WHERE, is_chat_model=False, max_tokens=4, temperature=0)
    assert plain.complete("Once").text == "".join(chunk.delta for chunk in plain.stream_complete("Once"))


@step(*REAL)
def forced_tool():
    answer = llm.chat_with_tools([TOOL], user_msg=SUM, tool_required=True)
    (call,) = llm.get_tool_calls_from_response(answer)
    assert call.tool_name == "weather"


@step("scripted")
def tool_round_trip():
    answer = llm.chat_with_tools([TOOL], user_msg="How is Paris?")
    (call,) = llm.get_tool_calls_from_response(answer)
    assert call.tool_kwargs == {"city": "Paris"}
    result = ChatMessage(role="tool", content="sunny", additional_kwargs={"tool_call_id": call.tool_id})
    question = ChatMessage(role="user", content="How is Paris?")
    last = llm.chat_with_tools([TOOL], chat_history=[question, answer.message, result])
    assert last.message.content == "It is sunny in Paris."


@step()
def an_answer_sent_back():
    assert llm.chat([*HELLO, llm.chat(HELLO).message, *HELLO]).message.content


@step(*REAL)
def structure():
    strict = OpenAILike(
        **WHERE, is_chat_model=True, is_function_calling_model=True, should_use_structured_outputs=True, max_tokens=200
    )
    assert isinstance(strict.as_structured_llm(Verdict).complete(SUM).raw, Verdict)


@step(*REAL)
def structure_by_a_tool():
    assert isinstance(llm.as_structured_llm(Verdict).complete(SUM).raw, Verdict)


@step(*REAL)
def embeddings():
    embed = OpenAILikeEmbedding(model_name=MODEL, api_base=BASE, api_key=KEY)
    assert len(embed.get_text_embedding("one")) == len(embed.get_query_embedding("two"))


@step()
def overflow():
    with raises(BadRequestError, "context_length_exceeded"):
        llm.chat([ChatMessage(role="user", content=LONG)])


@step(*REAL)
def a_closed_stream():
    before = metric(*ABORTED)
    model = OpenAILike(**WHERE, is_chat_model=True, max_tokens=1500, additional_kwargs={
        "extra_body": {"ignore_eos": True},
    })  # fmt: skip
    stream = model.stream_chat(HELLO)
    next(stream)
    stream.close()
    gc.collect()  # the library keeps the response in a cycle
    wait_for_an_abort(before)


run()
