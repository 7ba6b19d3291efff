"""`xserv chat`: a conversation on a terminal or on a pipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from runtime.commands import later
from runtime.commands.options import Adapter, LlmOptions, SamplingOptions

_answers, _chat_loop = later("runtime.commands.answers"), later("runtime.commands.chat_loop")


def chat(
    llm_options: LlmOptions,
    sampling: SamplingOptions,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    calculator: Annotated[
        bool, typer.Option("--calculator", help="A tool that the model may call: sums, products, quotients.")
    ] = False,
    adapter: Adapter = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(help="Picture for the first message, of a model that reads them; may be repeated."),
    ] = None,
) -> None:
    """Chat with a model. On a pipe each line is a message, and only answers go to stdout.

    A model without a chat template continues the text. On a terminal: Ctrl-C stops an answer, Ctrl-D leaves, /help
    lists the commands.
    """
    arguments, lora_request = _answers.with_adapter(llm_options.arguments(), adapter)
    _chat_loop.run(
        arguments, sampling.given(), system=system, calculates=calculator, pictures=image or (),
        lora_request=lora_request,
    )  # fmt: skip
