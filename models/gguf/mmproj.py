"""The second GGUF file of a model that reads pictures, its tower: "mmproj", as llama.cpp's converter writes it.

It lies beside the model as `mmproj*.gguf`, or is named by `--mmproj`. Read are those of Qwen's third tower
(`models.towers.qwen_vl`), projector `qwen3vl_merger`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from models.configuration.json_fields import REQUIRED, Fields
from models.errors import ConfigError, ModelLoadError
from models.gguf.config import find_architecture, plain
from models.gguf.reader import GgufFile
from tokenizer.warn import warn_once

NONE = "none"
"""The value of `--mmproj` for a model that shall read text alone."""

PATCHES = ("v.patch_embd.weight", "v.patch_embd.weight.1")
"""The patches' map, a tensor for each frame."""

_PROJECTOR = "qwen3vl_merger"
_PLACEHOLDER = "<|image_pad|>"
_TOWER = "model.visual."
_MAPS = {
    "v.patch_embd.bias": "patch_embed.proj.bias",
    "v.position_embd.weight": "pos_embed.weight",
    **{
        f"{theirs}.{kind}": f"{ours}.{kind}"
        for theirs, ours in (("v.post_ln", "merger.norm"), ("mm.0", "merger.linear_fc1"), ("mm.2", "merger.linear_fc2"))
        for kind in ("weight", "bias")
    },
}
_LAYER = {
    "ln1": "norm1", "ln2": "norm2", "attn_qkv": "attn.qkv", "attn_out": "attn.proj", "ffn_up": "mlp.linear_fc1",
    "ffn_down": "mlp.linear_fc2",
}  # fmt: skip
_MERGER = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}


class Mmproj:
    """A tower's file. Raises `WeightsError` for one that is malformed, `ConfigError` for one of another projector."""

    def __init__(self, path: Path) -> None:
        self.file = GgufFile(path)
        metadata = self.file.metadata
        own = {key: plain(value) for key, value in metadata.items() if key.startswith("clip.")}
        self._fields = Fields(own, str(path))
        if (name := metadata.get("general.architecture")) != "clip":
            raise ConfigError(
                f"{path}: general.architecture is {name!r:.80}, must be 'clip': give the file of the tower"
            )
        key = "clip.projector_type" if "clip.projector_type" in own else "clip.vision.projector_type"
        self._fields.expect(key, _PROJECTOR)

    @property
    def text_size(self) -> int:
        """The width of the language model."""
        return int(self._fields.integer("clip.vision.projection_dim", REQUIRED))

    def vision_config(self) -> dict[str, Any]:
        """The fields of a `vision_config`."""
        fields = self._fields
        fields.expect("clip.use_gelu", True)
        eps = fields.number("clip.vision.attention.layer_norm_epsilon", 1e-6)
        if abs(eps - 1e-6) > 1e-9:
            raise fields.error("clip.vision.attention.layer_norm_epsilon", f"= {eps} is not supported: 1e-6")
        names = {
            "block_count": "depth", "embedding_length": "hidden_size", "attention.head_count": "num_heads",
            "feed_forward_length": "intermediate_size", "patch_size": "patch_size",
        }  # fmt: skip
        found = {ours: fields.integer(f"clip.vision.{name}", REQUIRED) for name, ours in names.items()}
        table = self.file.tensors.get("v.position_embd.weight")
        return {
            **found,
            "out_hidden_size": self.text_size,
            "temporal_patch_size": len(PATCHES),
            "spatial_merge_size": fields.integer("clip.vision.spatial_merge_size", 2),
            "deepstack_visual_indexes": self.deepstack(),
            **({} if table is None else {"num_position_embeddings": table.shape[0]}),
        }

    def deepstack(self) -> list[int]:
        """The layers that are merged, too."""
        flags = self._fields.raw("clip.vision.is_deepstack_layers")
        if flags is None:  # older files
            places = {name.split(".")[2] for name in self.file.tensors if name.startswith("v.deepstack.")}
            return sorted(int(place) for place in places if place.isdecimal())
        return [layer for layer, flag in enumerate(flags if isinstance(flags, list) else [flags]) if flag]

    def preprocessor(self) -> Fields:
        """The fields of a `preprocessor_config.json`."""
        fields = self._fields
        limits = {
            edge: fields.integer(f"clip.vision.image_{name}_pixels", None)
            for edge, name in (("shortest_edge", "min"), ("longest_edge", "max"))
        }
        values = {name: fields.raw(f"clip.vision.{name}") for name in ("image_mean", "image_std", "patch_size")}
        values["size"] = {edge: limit for edge, limit in limits.items() if limit is not None}
        return Fields({name: value for name, value in values.items() if value is not None}, str(self.file.path))

    def names(self) -> dict[str, str]:
        """Names in safetensors of all tensors but the patches' map; an unknown name stays as it is, and fails the
        check for leftovers."""
        deepstack = {str(layer): place for place, layer in enumerate(self.deepstack())}
        found = {}
        for name in self.file.tensors:
            first, *inner = name.split(".")
            ours = _MAPS.get(name)
            if (first, *inner[:1]) == ("v", "blk") and len(inner) == 4 and inner[2] in _LAYER:
                ours = f"blocks.{inner[1]}.{_LAYER[inner[2]]}.{inner[3]}"
            elif (first, *inner[:1]) == ("v", "deepstack") and len(inner) == 4 and inner[2] in _MERGER:
                place = deepstack.get(inner[1])
                ours = None if place is None else f"deepstack_merger_list.{place}.{_MERGER[inner[2]]}.{inner[3]}"
            if name not in PATCHES:
                found[name] = name if ours is None else _TOWER + ours
        return found


PATCHES_NAME = f"{_TOWER}patch_embed.proj.weight"


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


def find_mmproj(model: GgufFile, chosen: str, *, reads_pictures: bool) -> Mmproj | None:
    """The tower of a model: the `chosen` file, or one beside the model that fits it; None if it reads text alone.
    Raises `WeightsError` and `ConfigError` for a chosen file that does not fit."""
    name = model.metadata.get("general.architecture")
    if chosen == NONE or (not chosen and not reads_pictures):
        return None
    if not reads_pictures:
        raise ConfigError(f"{model.path}: mmproj is {chosen!r:.200}, but {name} models read no pictures: leave it out")
    if chosen:
        (tower,) = map(Mmproj, towers_of(model.path, chosen))
        if problem := _misfit(tower, model):
            raise ConfigError(f"{chosen}: {problem}: give the tower of this model")
        return tower
    fitting = []
    for path in towers_of(model.path, chosen):
        try:
            tower = Mmproj(path)
        except ConfigError:  # another model's
            continue
        fitting += [] if _misfit(tower, model) else [tower]
    if len(fitting) > 1:
        warn_once(
            f"{model.path}: pictures are read by {fitting[0].file.path.name}; --mmproj FILE chooses another tower"
        )
    return fitting[0] if fitting else None


def _misfit(tower: Mmproj, model: GgufFile) -> str:
    """Why a tower is another model's; "" if it is this one's. Only Qwen3-VL's merge inner layers."""
    name = str(model.metadata["general.architecture"])
    width = model.metadata.get(f"{name}.embedding_length")
    if tower.text_size != width:
        return f"clip.vision.projection_dim = {tower.text_size} must be the model's embedding_length = {width}"
    expected = model.metadata.get(f"{name}.n_deepstack_layers", None if name.startswith("qwen3vl") else 0)
    if expected in (None, count := len(tower.deepstack())):
        return ""
    return f"merges {count} of its inner layers, but {model.path} has {name}.n_deepstack_layers = {expected}"


def with_pictures(values: Mapping[str, Any], model: GgufFile, class_name: str, tower: Mmproj) -> dict[str, Any]:
    """The config.json of a model with its tower, made of that of its text. Raises `ConfigError` for values that are not
    supported."""
    name = model.metadata["general.architecture"]
    vision = tower.vision_config()
    tokens = model.metadata.get("tokenizer.ggml.tokens", ())
    image_token_id = next((i for i, token in enumerate(tokens) if token == _PLACEHOLDER), None)  # type: ignore[arg-type]
    if image_token_id is None:
        raise ConfigError(f"{model.path}: tokenizer.ggml.tokens has no {_PLACEHOLDER!r}, which stands for pictures")
    text = dict(values)
    sections = plain(model.metadata.get(f"{name}.rope.dimension_sections", np.zeros(0)))[:3]
    outer = {key: text.pop(key) for key in ("tie_word_embeddings", "dtype")}
    text.pop("architectures")
    rope = text.get("rope_scaling") or {"rope_type": "default"}
    text["rope_scaling"] = {**rope, "mrope_section": sections, "mrope_interleaved": True}
    return {
        "architectures": [class_name], **outer, "image_token_id": image_token_id, "text_config": text,
        "vision_config": vision,
    }  # fmt: skip
