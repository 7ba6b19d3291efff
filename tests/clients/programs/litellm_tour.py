"""litellm, as `openai/MODEL` and by its router."""

import asyncio

import litellm
from steps import (
    ABORTED,
    BASE,
    FORCED,
    KEY,
    LONG,
    MODEL,
    REAL,
    SUM,
    TOOL,
    answered,
    is_city,
    metric,
    raises,
    run,
    step,
    wait_for_an_abort,
)

litellm.suppress_debug_info = True
HELLO = [{"role": "user", "content": SUM}]
WHERE = {"model": f"openai/{MODEL}", "api_base": BASE, "api_key": KEY}


def ask(messages=HELLO, **fields):
    return litellm.completion(**WHERE, messages=messages, **fields)


@step()
def chat():
    answer = ask(max_tokens=16, temperature=0)
    answered(answer.choices[0].message.content)
    assert answer.usage.completion_tokens > 0


@step()
def stream():
    fields = {"max_tokens": 16, "temperature": 0}
    chunks = list(ask(**fields, stream=True, stream_options={"include_usage": True}))
    whole = litellm.stream_chunk_builder(chunks, messages=HELLO)
    assert whole.choices[0].message.content == ask(**fields).choices[0].message.content
    assert whole.usage.completion_tokens > 0


@step()
async def asynchronous_stream():
    text = ""
    async for chunk in await litellm.acompletion(**WHERE, messages=HELLO, max_tokens=16, temperature=0, stream=True):
        text += chunk.choices[0].delta.content or ""
    answered(text)


@step(*REAL)
def forced_tool():
    for choice in (FORCED, "required"):
        answer = ask(tools=[TOOL], tool_choice=choice)
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "weather"
        is_city(call.function.arguments)
        chunks = list(ask(tools=[TOOL], tool_choice=choice, stream=True))
        is_city(litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls[0].function.arguments)


@step("scripted")
def tool_round_trip():
    first = ask(tools=[TOOL], tool_choice="auto").choices[0]
    assert first.finish_reason == "tool_calls", first
    (call,) = first.message.tool_calls
    is_city(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    last = ask([*HELLO, first.message, result], tools=[TOOL]).choices[0]
    assert last.finish_reason == "stop"
    assert last.message.content == "It is sunny in Paris."


@step()
def an_answer_sent_back():
    """As the object that litellm made, and as its `model_dump`, in which fields that were not told are null."""
    message = ask(max_tokens=16).choices[0].message
    for said in (message, message.model_dump()):
        assert ask([*HELLO, said, *HELLO], max_tokens=16).choices[0].message.content


@step(*REAL)
def structure():
    from pydantic import BaseModel, ConfigDict

    class Verdict(BaseModel):
        model_config = ConfigDict(extra="forbid")
        is_right: bool

    Verdict.model_validate_json(ask(response_format=Verdict).choices[0].message.content)


@step(*REAL)
def embeddings():
    answer = litellm.embedding(**WHERE, input=["one", "two"])
    assert [len(each["embedding"]) > 0 for each in answer.data] == [True, True]


@step(*REAL)
def text_completion():
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", api_base=BASE, api_key=KEY, prompt="Once", max_tokens=4
    )
    assert 1 <= answer.usage.completion_tokens <= 4


@step()
def overflow():
    long = [{"role": "user", "content": LONG}]
    with raises(litellm.ContextWindowExceededError):
        ask(long)
    router = litellm.Router(
        model_list=[
            {"model_name": "small", "litellm_params": WHERE},
            {"model_name": "large", "litellm_params": {**WHERE, "mock_response": "from the large one"}},
        ],
        context_window_fallbacks=[{"small": ["large"]}],
    )
    assert router.completion(model="small", messages=long).choices[0].message.content == "from the large one"


@step()
def errors():
    for wrong, kind in (
        ({"temperature": -3}, litellm.BadRequestError),
        ({"model": "openai/another"}, litellm.NotFoundError),
    ):
        with raises(kind):
            litellm.completion(**{**WHERE, **wrong}, messages=HELLO)


@step(*REAL)
def a_closed_stream():
    async def begin():
        fields = {"max_tokens": 1500, "stream": True, "extra_body": {"ignore_eos": True}}
        stream = await litellm.acompletion(**WHERE, messages=HELLO, **fields)
        await anext(stream)
        await stream.aclose()

    before = metric(*ABORTED)
    asyncio.run(begin())
    wait_for_an_abort(before)


run()
