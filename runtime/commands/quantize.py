"""`xserv quantize MODEL OUT --format ...`: a model's matrices in fewer bits, written as compressed-tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def quantize(
    model: Annotated[str, typer.Argument(metavar="PATH|HUB_ID", help="A folder in 16 or 32 bits, or a hub id.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; it must not exist.")],
    format: Annotated[
        Literal["fp8", "fp8-block", "int8", "int4", "int4-g32", "mxfp4"],
        typer.Option(help="fp8 and int8 have a scale a row, fp8-block one for 128 x 128, int4 one for 128 or 32."),
    ] = "int4-g32",
) -> None:
    """Write a model with quantised matrices, as compressed-tensors: for xserv, vLLM, SGLang and transformers."""
    from models.hub import resolve_model
    from models.quantized.write import quantize_folder
    from runtime.commands.info import size
    from runtime.llm.progress import progress

    with progress(f"quantising to {format}", 1000, True) as advance:
        shown = 0

        def show(done: int, total: int) -> None:
            nonlocal shown
            while shown < 1000 * done // total:
                shown += 1
                advance()

        written = quantize_folder(resolve_model(model), out, format, show)
    kept = f", {written.num_kept} stay floats" if written.num_kept else ""
    print(
        f"{out}: {written.num_quantised} matrices in {format}{kept}; {size(written.bytes_before)} became"
        f" {size(written.bytes_after)}"
    )
