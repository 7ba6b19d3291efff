"""DSPy's LM: alone, in a predictor, with its adapters, and in an agent that calls tools."""

from typing import Literal

import dspy
from dspy import lm15
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
    """DSPy asks for a schema only where it knows that a provider takes one, so the server is declared to it. The answer
    is one of the two words then, whatever the model knows."""
    access = lm15.AccessPolicy(provider="xserv", env_keys=("XSERV_API_KEY",), base_url=BASE)
    lm15.register_provider(
        lm15.ProviderDefinition.chat(access, compat=lm15.OpenAIChatCompat.preset("vllm")),
        supports=lm15.ModelSupport(function_calling=True, response_schema=True),
    )
    declared = dspy.LM(f"xserv/{MODEL}", api_base=BASE, api_key=KEY, cache=False, max_tokens=200, temperature=0)
    with dspy.context(lm=declared, adapter=dspy.JSONAdapter()):
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
