"""`xserv info`, `tokenize` and `perplexity` look at a model; `xserv quantize` writes its matrices in fewer bits, as
compressed-tensors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from runtime.commands import later
from runtime.commands.options import EngineOptions
from runtime.progress import ON_STDERR
from runtime.text_files import read_text_file

_info_report = later("runtime.commands.info_report")
_hub = later("models.checkpoints.hub")
_load = later("runtime.text.load")
_environment = later("runtime.bench.environment")
_perplexity = later("runtime.bench.perplexity")
_llm = later("runtime.llm")
_overrides = later("models.configuration.overrides")
_write = later("models.quantized.write")


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
    max_tokens: Annotated[
        int | None, typer.Option(help="Read only the first so many tokens of the text.", min=2)
    ] = None,
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


def quantize(
    model: Annotated[str, typer.Argument(metavar="PATH|HUB_ID", help="A folder in 16 or 32 bits, or a hub id.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; it must not exist.")],
    format: Annotated[
        Literal["fp8", "fp8-block", "int8", "int4", "int4-g32", "mxfp4"],
        typer.Option(help="fp8 and int8 have a scale a row, fp8-block one for 128 x 128, int4 one for 128 or 32."),
    ] = "int4-g32",
    calibration: Annotated[
        Path | None,
        typer.Option(help="With int4, int4-g32 and mxfp4: a text whose activations choose scales of channels (AWQ)."),
    ] = None,
    calibration_tokens: Annotated[int, typer.Option(help="So much of it.", min=1)] = 4096,
    hf_overrides: Annotated[
        str, typer.Option(metavar="JSON", help="Fields of the model's config.json to replace; null: leave one out.")
    ] = "",
) -> None:
    """Write a model with quantised matrices, as compressed-tensors: for xserv, vLLM, SGLang and transformers."""
    folder, chosen = _hub.resolve_model(model), None
    if calibration is not None:
        text = read_text_file(calibration)
        chosen = _load.read_tokenizer(folder).encode(text)[:calibration_tokens]
    with ON_STDERR.shown(f"quantising to {format}") as show:
        written = _write.quantize_folder(folder, out, format, show, chosen, _overrides.as_text(hf_overrides))
    kept = f", {written.num_kept} stay floats" if written.num_kept else ""
    lost = ""
    if written.gains:
        mean = sum(written.gains.values()) / len(written.gains)
        lost = f"; on the text {len(written.gains)} maps lose {mean:.0%} of what they would uncalibrated"
    print(
        f"{out}: {written.num_quantised} matrices in {format}{kept}; {_info_report.size(written.bytes_before)} became"
        f" {_info_report.size(written.bytes_after)}{lost}"
    )
