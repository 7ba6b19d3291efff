"""What the programs share: steps that run one after the other, and what every step may ask of the server itself.

    python PROGRAM.py URL MODEL KIND TOKENIZER

KIND names the server's model: "demo" (the bundled one, whose template knows no tools), "tools" (the same with a
template that does) or "scripted" (which calls the tool "weather" if there is one, and then answers). The output is a
line of JSON for each step: its name, how it failed, or null, and its seconds. A program runs in its client's
environment, so it imports nothing of this project. TOKENIZER is the bundled model's folder.
"""

import asyncio
import json
import sys
import time
import traceback
import urllib.request
from contextlib import contextmanager

URL, MODEL, KIND = sys.argv[1:4]
BASE = f"{URL}/v1"
KEY = "none"
SUM = "What is 17 plus 25?"
LONG = "What is 17 plus 25? " * 2000
"""More than any model's context here."""

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "description": "The weather of a city.", "parameters": CITY}
TOOL = {"type": "function", "function": WEATHER}
FORCED = {"type": "function", "function": {"name": "weather"}}

REAL = "demo", "tools"
"""Servers of a real engine, which holds a model to a schema, or to a call."""

_steps = []


def step(*kinds):
    """Marks a function as a step for servers of these kinds; none named: all."""

    def mark(function):
        if not kinds or KIND in kinds:
            _steps.append(function)
        return function

    return mark


def run():
    with asyncio.Runner() as runner:  # clients keep connections of one event loop
        for each in _steps:
            error, start = None, time.monotonic()
            try:
                result = each()
                if asyncio.iscoroutine(result):
                    runner.run(result)
            except BaseException as raised:
                frames = traceback.extract_tb(raised.__traceback__)
                lines = [frame.lineno for frame in frames if frame.filename == sys.argv[0]]
                error = f"{type(raised).__name__} in lines {lines}: {str(raised)[:1500]}"
            print(json.dumps({"step": each.__name__, "error": error, "seconds": time.monotonic() - start}), flush=True)


@contextmanager
def raises(kind, says=""):
    """Fails unless the block raises a `kind` that has `says` in its text or in its fields."""
    raised = None
    try:
        yield
    except kind as error:
        raised = error
    assert raised, f"no {kind.__name__} was raised"
    assert says in f"{raised} {vars(raised)}", raised


def answered(text):
    """Fails if the text is not what the model says to SUM."""
    assert isinstance(text, str), text
    assert text == ("Hello." if KIND == "scripted" else "42"), text


def is_city(arguments):
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert found in ({"city": "Paris"}, {"city": "Rome"}), found


def metric(name, label=""):
    """The sum of a metric's samples whose labels contain `label`."""
    with urllib.request.urlopen(f"{URL}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{") and label in line)


ABORTED = "vllm:request_success_total", 'finished_reason="abort"'


def wait_for_an_abort(before):
    """Returns once the server has cancelled one more request than `before`."""
    deadline = time.monotonic() + 60
    while metric(*ABORTED) <= before:
        assert time.monotonic() < deadline, "the server did not notice that the stream was closed"
        time.sleep(0.05)
