"""The second GGUF file of a model that reads pictures, its tower: "mmproj", as llama.cpp's converter writes it.

It lies beside the model as `mmproj*.gguf`, or is named by `--mmproj`. A projector's type says what it is:
`models.gguf.qwen_projector` and `models.gguf.gemma4_projector` have those that are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from models.configuration.json_fields import Fields
from models.errors import ConfigError, ModelLoadError
from models.gguf.config import find_architecture, plain
from models.gguf.gemma4_projector import Gemma4PixelMapProjector, Gemma4TowerProjector
from models.gguf.projector import Projector
from models.gguf.qwen_projector import QwenProjector
from models.gguf.reader import GgufFile
from tokenizer.warn import warn_once

NONE = "none"
"""The value of `--mmproj` for a model that shall read text alone."""

PROJECTORS: dict[str, type[Projector]] = {
    "qwen3vl_merger": QwenProjector, "gemma4v": Gemma4TowerProjector, "gemma4uv": Gemma4PixelMapProjector,
}  # fmt: skip
"""By `projector_type`."""


def open_projector(path: Path, classes: Mapping[str, str]) -> Projector:
    """A tower's file, for a model whose class with pictures `classes` gives by the projector's type. Raises
    `WeightsError` for one that is malformed, `ConfigError` for one of another projector."""
    file = GgufFile(path)
    own = {key: plain(value) for key, value in file.metadata.items() if key.startswith("clip.")}
    fields = Fields(own, str(path))
    if (name := file.metadata.get("general.architecture")) != "clip":
        raise ConfigError(f"{path}: general.architecture is {name!r:.80}, must be 'clip': give the file of the tower")
    key = "clip.projector_type" if "clip.projector_type" in own else "clip.vision.projector_type"
    fields.expect(key, *classes)
    kind = fields.string(key)
    return PROJECTORS[kind](file, fields, classes[kind])


def reads_pictures(path: Path) -> bool:
    """Whether the model of a file may have a tower; False for a file that cannot be read, as its reader will say."""
    try:
        return bool(find_architecture(GgufFile(path)).pictures)
    except ModelLoadError:
        return False


def towers_of(model: Path, chosen: str) -> list[Path]:
    """The files that may be the tower of a model's file."""
    if chosen:
        return [] if chosen == NONE else [Path(chosen).expanduser()]
    folders = [model.parent]
    if model.parent.parent.parent.name == "snapshots":  # a hub's repository has towers above the folders of shards
        folders.append(model.parent.parent)
    return [path for folder in folders for path in sorted(folder.glob("mmproj*.gguf"))]


def find_mmproj(model: GgufFile, chosen: str, classes: Mapping[str, str]) -> Projector | None:
    """The tower of a model with these `classes`: the `chosen` file, or one beside the model that fits it; None if it
    reads text alone. Raises `WeightsError` and `ConfigError` for a chosen file that does not fit."""
    name = model.metadata.get("general.architecture")
    if chosen == NONE or (not chosen and not classes):
        return None
    if not classes:
        raise ConfigError(f"{model.path}: mmproj is {chosen!r:.200}, but {name} models read no pictures: leave it out")
    if chosen:
        (path,) = towers_of(model.path, chosen)
        tower = open_projector(path, classes)
        if problem := tower.misfit(model):
            raise ConfigError(f"{chosen}: {problem}: give the tower of this model")
        return tower
    fitting = []
    for path in towers_of(model.path, chosen):
        try:
            tower = open_projector(path, classes)
        except ConfigError:  # another model's
            continue
        fitting += [] if tower.misfit(model) else [tower]
    if len(fitting) > 1:
        warn_once(
            f"{model.path}: pictures are read by {fitting[0].file.path.name}; --mmproj FILE chooses another tower"
        )
    return fitting[0] if fitting else None
