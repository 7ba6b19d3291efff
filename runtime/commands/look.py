"""`xserv info`, `xserv tokenize` and `xserv perplexity`: look at a model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from runtime.commands import later
from runtime.commands.options import EngineOptions
from runtime.text_files import read_text_file

_info_report = later("runtime.commands.info_report")
_hub = later("models.checkpoints.hub")
_load = later("runtime.text.load")
_environment = later("runtime.bench.environment")
_perplexity = later("runtime.bench.perplexity")
_llm = later("runtime.llm")


def info(
    engine: EngineOptions,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show the devices, the model, and the memory table: weights, KV blocks, and tokens that fit.

    The numbers are those of `serve` with the given flags; only headers of the model's files are read.
    """
    _info_report.show(engine.arguments(), load_format=engine.load_format, as_json=as_json)


def tokenize(
    text: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TEXT|IDS]...", help="Text, or ids with --decode; else stdin."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="PATH|HUB_ID", help="Default: the bundled model.")
    ] = None,
    decode: Annotated[bool, typer.Option("--decode", help="Ids in, text out.")] = False,
    add_special_tokens: Annotated[bool, typer.Option(help="As the model's tokenizer adds them.")] = True,
    skip_special_tokens: Annotated[bool, typer.Option(help="Leave them out of decoded text.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show the token ids and tokens of a text, one a line; with --decode, the text of ids."""
    tokenizer = _load.read_tokenizer(_hub.resolve_model(model))
    source = " ".join(text) if text else sys.stdin.read()
    if decode:
        ids = [_id(part) for part in source.replace(",", " ").replace("[", " ").replace("]", " ").split()]
        decoded = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        print(json.dumps({"ids": ids, "text": decoded}, ensure_ascii=False) if as_json else decoded)
        return
    if not text:
        source = source.removesuffix("\n")
    ids = tokenizer.encode(source, add_special_tokens=add_special_tokens)
    tokens = [tokenizer.id_to_token(token_id) for token_id in ids]
    if as_json:
        print(json.dumps({"text": source, "ids": ids, "tokens": tokens}, ensure_ascii=False))
        return
    for token_id, token in zip(ids, tokens):
        print(f"{token_id}\t{token}")


def _id(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no token id") from None


def perplexity(
    engine: EngineOptions,
    text: Annotated[Path, typer.Argument(metavar="TEXT", help="A file in UTF-8.")],
    window: Annotated[
        int | None, typer.Option(help="Tokens at a time; default: 1024, or one less than the model's positions.", min=2)
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Tokens from one window to the next; default: half a window.", min=1)
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Leave out the text behind so many tokens.", min=2)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The whole report as one JSON object.")] = False,
) -> None:
    """Measure a model on a text: the perplexity over windows that overlap, every token but the first scored once."""
    content = read_text_file(text)
    with _llm.LLM(**{**engine.arguments(), "enable_prefix_caching": False}) as llm:
        report = {
            **_perplexity.measure(llm, content, window, stride, max_tokens),
            **_environment.describe_engine(llm.client.info),
        }
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        print(f"perplexity {report['perplexity']:.4f} over {report['num_scored_tokens']:,} tokens")
