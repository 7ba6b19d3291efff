"""`xserv quantize MODEL OUT --format ...`: a model's matrices in fewer bits, written as compressed-tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from runtime.commands import later
from runtime.progress import ON_STDERR
from runtime.text_files import read_text_file

_hub = later("models.checkpoints.hub")
_overrides = later("models.configuration.overrides")
_write = later("models.quantized.write")
_report = later("runtime.commands.info_report")
_load = later("runtime.text.load")


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
        chosen = _write.Calibration(_load.read_tokenizer(folder).encode(text)[:calibration_tokens])
    with ON_STDERR.shown(f"quantising to {format}") as show:
        written = _write.quantize_folder(folder, out, format, show, chosen, _overrides.as_text(hf_overrides))
    kept = f", {written.num_kept} stay floats" if written.num_kept else ""
    lost = ""
    if written.gains:
        mean = sum(written.gains.values()) / len(written.gains)
        lost = f"; on the text {len(written.gains)} maps lose {mean:.0%} of what they would uncalibrated"
    print(
        f"{out}: {written.num_quantised} matrices in {format}{kept}; {_report.size(written.bytes_before)} became"
        f" {_report.size(written.bytes_after)}{lost}"
    )
