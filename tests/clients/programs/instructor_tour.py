"""instructor in every mode that is of OpenAI's API: a mode is a step."""

from collections.abc import Iterable

import instructor
from instructor import Mode
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel
from steps import BASE, KEY, KIND, LONG, MODEL, REAL, SUM, raises, run, step

MESSAGES = [{"role": "user", "content": SUM}]
client = OpenAI(base_url=BASE, api_key=KEY, max_retries=0)


class Verdict(BaseModel):
    is_right: bool


class weather(BaseModel):
    """The weather of a city."""

    city: str


def verdict(mode, **fields):
    found = instructor.from_openai(client, mode=mode).create(
        model=MODEL, messages=MESSAGES, response_model=Verdict, max_retries=1, **fields
    )
    assert isinstance(found, Verdict), found


def strictly(mode):
    """The server holds the model to the schema."""

    def check():
        verdict(mode)

    check.__name__ = mode.name
    step(*REAL)(check)


def by_instruction(mode):
    """The schema stands in the prompt alone; a model that can do it is the scripted one."""

    def check():
        verdict(mode)

    check.__name__ = mode.name
    step("scripted")(check)


for each in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.FUNCTIONS, Mode.JSON_SCHEMA, Mode.JSON_O1, Mode.RESPONSES_TOOLS):
    strictly(each)
for each in (Mode.JSON, Mode.MD_JSON):
    by_instruction(each)


@step("scripted")
def PARALLEL_TOOLS():
    found = instructor.from_openai(client, mode=Mode.PARALLEL_TOOLS).create(
        model=MODEL, messages=MESSAGES, response_model=Iterable[weather]
    )
    assert [each.city for each in found] == ["Paris"]


@step(*REAL)
def partial_stream():
    parts = list(
        instructor.from_openai(client, mode=Mode.TOOLS).create_partial(
            model=MODEL, messages=MESSAGES, response_model=Verdict
        )
    )
    assert isinstance(parts[-1].is_right, bool)


@step(*REAL)
async def asynchronous():
    async with AsyncOpenAI(base_url=BASE, api_key=KEY, max_retries=0) as sdk:
        found = await instructor.from_openai(sdk, mode=Mode.JSON_SCHEMA).create(
            model=MODEL, messages=MESSAGES, response_model=Verdict
        )
    assert isinstance(found, Verdict)


@step()
def overflow():
    from instructor.core import InstructorRetryException

    with raises(InstructorRetryException, "maximum context length"):
        instructor.from_openai(client).create(
            model=MODEL, messages=[{"role": "user", "content": LONG}], response_model=Verdict
        )


assert KIND in ("demo", "tools", "scripted")
run()
