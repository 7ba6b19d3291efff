"""Options of benchmarks: the flags of a command, and the one value that its measurement takes.

The commands' help imports this module, and of the benches only this one: it needs no library but typer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from runtime.engine.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class StreamingOptions:
    """The options of `bench streaming`."""

    num_requests: Annotated[int, typer.Option(help="Requests of one burst.")] = 32
    prompt_len: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 4
    max_tokens: Annotated[int, typer.Option(help="New tokens of each.")] = 8
    num_warmup_rounds: Annotated[int, typer.Option(help="Bursts before the timed ones.")] = 2
    num_rounds: Annotated[int, typer.Option(help="Timed bursts; the median one is reported.")] = 5


@dataclass(frozen=True, kw_only=True)
class Load:
    """Options of `bench serve`: how and when requests are sent."""

    endpoint: Annotated[Literal["completions", "chat"], typer.Option(help="Route that is asked.")] = "completions"
    request_rate: Annotated[float, typer.Option(help="Requests a second; inf: all at once.")] = float("inf")
    burstiness: Annotated[float, typer.Option(help="Shape of the gaps; 1: a Poisson process.")] = 1.0
    max_concurrency: Annotated[int | None, typer.Option(help="Most open requests.")] = None
    ignore_eos: Annotated[bool, typer.Option(help="Ask for exactly the output length.")] = True
    temperature: Annotated[float, typer.Option(help="Temperature of the sampling.")] = 0.0
    timeout_s: Annotated[float, typer.Option(help="Seconds that one answer may take.")] = 600.0


@dataclass(frozen=True, kw_only=True)
class StallsOptions:
    """The options of `bench stalls`."""

    budget: Annotated[int | None, typer.Option(help="Tokens of a stall-free step; default: measured.")] = None
    tpot_ratio: Annotated[float, typer.Option(help="The measured budget's target, in steps of decodes alone.")] = 1.7
    num_decodes: Annotated[int, typer.Option(help="Sequences that decode.")] = 8
    context_len: Annotated[int, typer.Option(help="Tokens before each of them.")] = 128
    prompt_len: Annotated[int, typer.Option(help="Tokens of the prompt that comes beside them.")] = 4096
    num_usual_steps: Annotated[int, typer.Option(help="Steps before it comes, for the usual TPOT.")] = 30
    num_rounds: Annotated[int, typer.Option(help="Steps timed for each size of the budget's measurement.")] = 5


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """The options of `bench speculation`."""

    batches: Annotated[str, typer.Option(metavar="N,N,...", help="Sequences that decode.")] = "1,4,8,32"
    rates: Annotated[str, typer.Option(metavar="P,P,...", help="How often a proposal is right.")] = (
        "0.3,0.5,0.7,0.8,0.9"
    )
    output_len: Annotated[int, typer.Option(help="Tokens of each answer.")] = 128
    num_rounds: Annotated[int, typer.Option(help="Answers with each number of proposals, in turns.")] = 3
    num_warm_rounds: Annotated[int, typer.Option(help="Before them, in which the choice learns.")] = 1
    fixed: Annotated[
        str, typer.Option(metavar="K,K,...", help="Fixed numbers of proposals that run beside; empty: none.")
    ] = "1,3,7"


def numbers(name: str, text: str) -> tuple[float, ...]:
    """``"0.3,1"`` → ``(0.3, 1.0)``. Raises `RequestError` with the option's name."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise RequestError(f"{name} must be numbers with commas between them, got {text!r:.80}", param=name) from None
