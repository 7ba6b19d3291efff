"""DSPy's LM: alone, in a predictor, with its adapters, and in an agent that calls tools."""

from typing import Literal

import dspy
from steps import BASE, KEY, LONG, MODEL, REAL, SUM, answered, raises, run, step

lm = dspy.LM(f"openai/{MODEL}", api_base=BASE, api_key=KEY, cache=False, max_tokens=200, temperature=0)


class Question(dspy.Signature):
    """Answer it."""

    question: str = dspy.InputField()
    verdict: Literal["yes", "no"] = dspy.OutputField()


@step()
def chat():
    (text,) = lm(SUM)
    answered(text)


@step()
def responses():
    model = dspy.LM(f"openai/{MODEL}", api_base=BASE, api_key=KEY, cache=False, model_type="responses", max_tokens=200)
    (found,) = model(SUM)
    answered(found["text"] if isinstance(found, dict) else found)


@step(*REAL)
def predictor():
    """The adapter asks for a schema: the answer is one of the two words, whatever the model knows."""
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        assert dspy.Predict(Question)(question="Is it so?").verdict in ("yes", "no")


@step(*REAL)
def embeddings():
    embed = dspy.Embedder(f"openai/{MODEL}", api_base=BASE, api_key=KEY, caching=False)
    assert len(embed(["one", "two"])) == 2


@step()
def overflow():
    with raises(dspy.ContextWindowExceededError):
        lm(LONG)


run()
