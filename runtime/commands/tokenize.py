"""`xserv tokenize`: text to ids and tokens, or back."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer


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
    from models.checkpoints.hub import resolve_model
    from runtime.text.load import read_tokenizer

    tokenizer = read_tokenizer(resolve_model(model))
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
