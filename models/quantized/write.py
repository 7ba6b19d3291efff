"""Writes a 16- or 32-bit model with quantised matrices, as compressed-tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.model_files import ModelFolder
from models.checkpoints.safetensors_file import write_tensors
from models.checkpoints.weight_files import INDEX_FILE, SINGLE_FILE
from models.errors import ModelLoadError, WeightsError
from models.families import architecture_named
from models.quantized.calibrate import Folded, calibrate
from models.quantized.parts import refusal
from models.quantized.scheme import FIELD
from models.registry import quantisable_matrices
from runtime.dtype import DType, float32
from runtime.errors import InvalidArgumentError
from runtime.linear.quantise import Rounding, quantise
from runtime.linear.quantized import NumberKind, QuantizedMatrix
from runtime.tensor.cast import cast_array

Array = np.ndarray[Any, Any]
Stored = tuple[str, np.dtype[Any], tuple[int, ...]]

_COPIED = ("*.json", "*.jinja", "merges.txt", "LICENSE*", "NOTICE*", "README.md")
_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """A choice of `xserv quantize`.

    Attributes:
        kind, block: of the matrices.
        format: compressed-tensors' name.
        weights, activations: that config's fields.
        has_exponents: whether scales are e8m0; else they have the model's type.
    """

    kind: NumberKind
    block: tuple[int, int]
    format: str
    weights: dict[str, Any]
    activations: dict[str, Any] | None = None
    has_exponents: bool = False

    def rounding(self, stored: DType) -> Rounding:
        """The rounding of a matrix that is stored in this type."""
        return Rounding(self.kind, self.block, _E8M0 if self.has_exponents else stored.numpy)

    def config(self, ignored: list[str]) -> dict[str, Any]:
        """The `quantization_config`."""
        weights = {"symmetric": True, "dynamic": False, **self.weights}
        activations = None
        if self.activations is not None:
            activations = {"symmetric": True, "dynamic": True, "num_bits": 8, **self.activations}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "format": self.format}
        return {
            "quant_method": "compressed-tensors", "format": self.format, "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": ignored,
        }  # fmt: skip


def _int4(size: int) -> OutputFormat:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": size}
    return OutputFormat("int4", (1, size), "pack-quantized", weights)


OUTPUT_FORMATS: dict[str, OutputFormat] = {
    "fp8": OutputFormat(
        "fp8", (1, 0), "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"},
        {"type": "float", "strategy": "token"},
    ),
    "fp8-block": OutputFormat(
        "fp8", (128, 128), "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
        {"type": "float", "strategy": "group", "group_size": 128},
    ),
    "int8": OutputFormat(
        "int8", (1, 0), "int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"},
        {"type": "int", "strategy": "token"},
    ),
    "int4": _int4(128),
    "int4-g32": _int4(32),
    "mxfp4": OutputFormat(
        "fp4", (1, 32), "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        has_exponents=True,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Written:
    """The result of `quantize_folder`: counts of matrices, and bytes of all tensors; `gains` are `Folded`'s."""

    num_quantised: int
    num_kept: int
    bytes_before: int
    bytes_after: int
    gains: Mapping[str, float] = field(default_factory=dict)


def quantize_folder(
    source: Path, target: Path, format: str, show: Callable[[int, int], None] = lambda done, total: None,
    calibration: Sequence[int] | None = None, overrides: str = "",
) -> Written:  # fmt: skip
    """Writes `source` to the new folder `target`: its linear maps in `format`, but the output head, all else as it is.

    Maps whose rows are not whole groups stay floats. `show` gets how many tensors are done, and how many there are.
    `calibration` has a text's ids, on whose activations scales are found (`calibrate`); the maps that are searched for
    them come first. `overrides` are of the config's fields (`models.configuration.overrides`), and are written so.

    Raises:
        ModelLoadError: naming file, tensor or field, for a model that cannot be read, is quantised already, or stores
            its maps inputs first, and for a number that is not finite.
        InvalidArgumentError: for an unknown format, or a target that exists.
    """
    if format not in OUTPUT_FORMATS:
        raise InvalidArgumentError(f"format is {format!r}, must be one of {', '.join(OUTPUT_FORMATS)}", param="format")
    output = OUTPUT_FORMATS[format]
    if target.exists():
        raise InvalidArgumentError(f"{target} exists: give a folder that does not", param="target")
    if calibration is not None and output.kind not in ("int4", "fp4"):
        raise InvalidArgumentError(
            f"calibration is for int4, int4-g32 and mxfp4: {format} rounds activations, too", param="calibration"
        )
    if not source.is_dir():
        raise ModelLoadError(f"{source} is no folder: a GGUF file is quantised by llama.cpp's tools")
    files = ModelFolder(source, overrides)
    config = files.config()
    if config.has(FIELD):
        raise ModelLoadError(f"{config.where}: has a {FIELD}: give the model that it was made from")
    checkpoint = files.checkpoint()
    model_config, matrices = quantisable_matrices(source, checkpoint, overrides)  # renames the checkpoint's tensors
    names = {name: checkpoint[name].name for name in checkpoint.tensors}
    taken = {name for name in matrices if output.rounding(float32).takes(checkpoint[name].shape[1])}
    ignored = ["lm_head", *sorted(names[name].removesuffix(".weight") for name in matrices - taken)]
    folded = None
    if calibration is not None:
        folded = calibrate(
            model_config, architecture_named(model_config.architecture).class_of(model_config), checkpoint,
            calibration,
            lambda name: output.rounding(checkpoint.dtype(name)) if name in taken else None,
            lambda done, total: show(done, total + len(names)),
        )  # fmt: skip
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        written = _write(checkpoint, names, taken, output, partial, show, folded or Folded())
        for pattern in _COPIED:
            for path in source.glob(pattern):
                if path.name not in ("config.json", INDEX_FILE):
                    shutil.copy(path, partial / path.name)
        values = {**config.values(), FIELD: output.config(ignored)}
        (partial / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    before = sum(stored.size_bytes for stored in checkpoint.tensors.values())
    return Written(len(taken), len(matrices) - len(taken), before, written, {} if folded is None else folded.gains)


def _write(
    checkpoint: Checkpoint, names: dict[str, str], taken: set[str], output: OutputFormat, folder: Path,
    show: Callable[[int, int], None], folded: Folded,
) -> int:  # fmt: skip
    """One file of all tensors; returns their bytes."""
    plan: list[Stored] = []
    for name, stored_name in names.items():
        stored = checkpoint[name]
        if name in taken:
            plan += _parts_of(stored_name, (stored.shape[0], stored.shape[1]), output, checkpoint.dtype(name))
        else:
            plan.append((stored_name, checkpoint.dtype(name).numpy, stored.shape))

    def arrays() -> Iterator[Array]:
        searched = len(folded.gains)
        for done, name in enumerate(names, searched):
            show(done, searched + len(names))
            array = checkpoint[name].array()
            if name in taken:
                values = cast_array(array, float32)
                if not np.isfinite(values).all():
                    raise refusal(checkpoint[name], "has a number that is not finite")
                if folded.changes(name):
                    array = folded.apply(name, values)
                matrix = quantise(array, output.rounding(checkpoint.dtype(name)))
                yield from _arrays_of(matrix)
            elif folded.changes(name):
                yield folded.apply(name, cast_array(array, float32)).astype(array.dtype)
            elif name in folded.vectors:
                yield folded.vectors[name]
            else:
                yield array
            with suppress(WeightsError):
                checkpoint[name].release()
        show(searched + len(names), searched + len(names))

    write_tensors(folder / SINGLE_FILE, plan, arrays())
    return sum(int(np.prod(shape)) * dtype.itemsize for _, dtype, shape in plan)


def _parts_of(name: str, shape: tuple[int, int], output: OutputFormat, dtype: DType) -> list[Stored]:
    """Names, types and shapes of a matrix's stored parts, in the order of `_arrays_of`."""
    (width, depth), (rows, elements) = shape, output.block
    scales = (-(-width // rows), -(-depth // elements) if elements else 1)
    scale: Stored = f"{name}_scale", np.dtype(np.uint8) if output.has_exponents else dtype.numpy, scales
    if output.kind == "int4":
        packed = (f"{name}_packed", np.dtype(np.int32), (width, -(-depth // 8)))
        return [packed, scale, (f"{name}_shape", np.dtype(np.int64), (2,))]
    if output.kind == "fp4":
        return [(f"{name}_packed", np.dtype(np.uint8), (width, depth // 2)), scale]
    numbers = np.dtype(np.int8) if output.kind == "int8" else np.dtype(ml_dtypes.float8_e4m3fn)
    return [(name, numbers, shape), scale]


def _arrays_of(matrix: QuantizedMatrix) -> Iterator[Array]:
    kind, codes, scales = matrix.layout.kind, matrix.codes, matrix.scales
    if kind == "int4":
        yield from (np.pad(codes, ((0, 0), (0, -codes.shape[1] % 4))).view(np.int32), scales)
        yield np.array(matrix.shape, np.int64)
    elif kind == "int8":
        yield from ((codes ^ np.uint8(128)).view(np.int8), scales)
    elif kind == "fp8":
        yield from (codes.view(ml_dtypes.float8_e4m3fn), scales)
    else:
        yield from (codes, scales.view(np.uint8))
