"""`xserv embed` and `xserv rank`: texts to vectors, and documents by their relevance to a query."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from runtime import collector
from runtime.commands import later
from runtime.commands.generate import read_prompts
from runtime.commands.options import LlmOptions

_llm = later("runtime.llm")
_numpy = later("numpy")


def embed(
    file: Annotated[
        Path,
        typer.Argument(
            help="One text a line, empty lines skipped; - is stdin. In a .jsonl file each line is "
            '{"prompt": TEXT} or {"prompt_token_ids": [IDS]}.'
        ),
    ],
    llm_options: LlmOptions,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="A .npy file of float32 [texts, size]; else a JSON array a line."),
    ] = None,
    pooling: Annotated[
        str | None, typer.Option(help="cls, last, mean, max, weighted_mean or mean_sqrt_len; the model's own.")
    ] = None,
    prompt_name: Annotated[str | None, typer.Option(help="The model's prompt before each text, such as query.")] = None,
    dimensions: Annotated[int | None, typer.Option(help="Only the first so many numbers.")] = None,
    truncate: Annotated[bool, typer.Option(help="Cut texts that are too long at their end.")] = True,
) -> None:
    """Embed the texts of a file, one vector a line."""
    prompts = read_prompts(file)
    if not prompts:
        raise typer.BadParameter(f"{file} has no text")
    if output is not None and output.suffix != ".npy":
        raise typer.BadParameter(f"--output {output}: its name must end in .npy")
    with nullcontext() if output is None else _whole(output) as whole, _llm.LLM(**llm_options.arguments()) as llm:
        collector.resume()
        are_texts = all(isinstance(each, str) for each in prompts)
        found = llm.embed(
            prompts, pooling=pooling, prompt_name=prompt_name if are_texts else None, dimensions=dimensions,
            truncate_prompt_tokens=-1 if truncate and are_texts else None,
        )  # fmt: skip
        vectors = [each.outputs.embedding for each in found]
        if whole is None:
            for vector in vectors:
                print(json.dumps(vector))
            return
        array = _numpy.array(vectors, _numpy.float32)
        _numpy.save(content := io.BytesIO(), array)
        whole.write(content.getbuffer())
    print(f"{output}: {array.shape[0]} vectors of {array.shape[1]} numbers")


@contextmanager
def _whole(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the path's place once it is whole. It is made at once, so that a path that cannot be written
    is told before any text is read. A pipe is written itself, and a link's file is replaced."""
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    path = path.resolve()
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def rank(
    query: Annotated[str, typer.Argument(help="The query.")],
    file: Annotated[Path, typer.Argument(help="One document a line, empty lines skipped; - is stdin.")],
    llm_options: LlmOptions,
    top: Annotated[int | None, typer.Option(min=1, help="Only the best so many.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a document, one a line.")] = False,
) -> None:
    """Rank the documents of a file by their relevance to a query, the best first."""
    documents = [each for each in read_prompts(file) if isinstance(each, str)]
    if not documents:
        raise typer.BadParameter(f"{file} has no text")
    with _llm.LLM(**llm_options.arguments()) as llm:
        collector.resume()
        scores = [each.outputs.score for each in llm.score(query, documents, truncate_prompt_tokens=-1)]
    for index in sorted(range(len(scores)), key=lambda each: -scores[each])[:top]:
        if as_json:
            entry = {"index": index, "relevance_score": scores[index], "document": documents[index]}
            print(json.dumps(entry, ensure_ascii=False))
        else:
            print(f"{scores[index]:.4f}\t{documents[index]}")
