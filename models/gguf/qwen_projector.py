"""The files of Qwen's third tower (`models.towers.qwen_vl`): Qwen3-VL's, and that of Qwen3.5 to 3.8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from models.checkpoints.stored_tensor import StoredTensor
from models.configuration.json_fields import Fields
from models.gguf.config import plain
from models.gguf.projector import Projector, token_id
from models.gguf.reader import GgufFile
from models.gguf.weights import GgufFrames, GgufWeight

_PATCHES = ("v.patch_embd.weight", "v.patch_embd.weight.1")
"""The patches' map, a tensor for each frame."""

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


class QwenProjector(Projector):
    """See `Projector`. Layers of the deepstack are merged, too; only Qwen3-VL's has any."""

    def vision_config(self) -> dict[str, Any]:
        fields = self._fields
        fields.expect("clip.use_gelu", True)
        eps = fields.number("clip.vision.attention.layer_norm_epsilon", 1e-6)
        if abs(eps - 1e-6) > 1e-9:
            raise fields.error("clip.vision.attention.layer_norm_epsilon", f"= {eps} is not supported: 1e-6")
        found = self.sizes({
            "block_count": "depth", "embedding_length": "hidden_size", "attention.head_count": "num_heads",
            "feed_forward_length": "intermediate_size", "patch_size": "patch_size",
            "projection_dim": "out_hidden_size",
        })  # fmt: skip
        table = self.file.tensors.get("v.position_embd.weight")
        return {
            **found,
            "temporal_patch_size": len(_PATCHES),
            "spatial_merge_size": fields.integer("clip.vision.spatial_merge_size", 2),
            "deepstack_visual_indexes": self._deepstack(),
            **({} if table is None else {"num_position_embeddings": table.shape[0]}),
        }

    def _deepstack(self) -> list[int]:
        flags = self._fields.raw("clip.vision.is_deepstack_layers")
        if flags is None:  # older files
            places = {name.split(".")[2] for name in self.file.tensors if name.startswith("v.deepstack.")}
            return sorted(int(place) for place in places if place.isdecimal())
        return [layer for layer, flag in enumerate(flags if isinstance(flags, list) else [flags]) if flag]

    def preprocessor(self) -> Fields:
        fields = self._fields
        limits = {
            edge: fields.integer(f"clip.vision.image_{name}_pixels", None)
            for edge, name in (("shortest_edge", "min"), ("longest_edge", "max"))
        }
        values = {name: fields.raw(f"clip.vision.{name}") for name in ("image_mean", "image_std", "patch_size")}
        values["size"] = {edge: limit for edge, limit in limits.items() if limit is not None}
        return Fields({name: value for name, value in values.items() if value is not None}, str(self.file.path))

    def tensors(self) -> dict[str, StoredTensor]:
        deepstack = {str(layer): place for place, layer in enumerate(self._deepstack())}
        found: dict[str, StoredTensor] = {
            f"{_TOWER}patch_embed.proj.weight": GgufFrames([GgufWeight(self.file, name) for name in _PATCHES])
        }
        for name in self.file.tensors:
            first, *inner = name.split(".")
            ours = _MAPS.get(name)
            if (first, *inner[:1]) == ("v", "blk") and len(inner) == 4 and inner[2] in _LAYER:
                ours = f"blocks.{inner[1]}.{_LAYER[inner[2]]}.{inner[3]}"
            elif (first, *inner[:1]) == ("v", "deepstack") and len(inner) == 4 and inner[2] in _MERGER:
                place = deepstack.get(inner[1])
                ours = None if place is None else f"deepstack_merger_list.{place}.{_MERGER[inner[2]]}.{inner[3]}"
            if name not in _PATCHES:
                found[name if ours is None else _TOWER + ours] = GgufWeight(self.file, name)
        return found

    def misfit(self, model: GgufFile) -> str:
        if problem := super().misfit(model):
            return problem
        name = str(model.metadata["general.architecture"])
        expected = model.metadata.get(f"{name}.n_deepstack_layers", None if name.startswith("qwen3vl") else 0)
        if expected in (None, count := len(self._deepstack())):
            return ""
        return f"merges {count} of its inner layers, but {model.path} has {name}.n_deepstack_layers = {expected}"

    def text_changes(self, text: Mapping[str, Any], model: GgufFile) -> tuple[dict[str, Any], dict[str, Any]]:
        name = model.metadata["general.architecture"]
        sections = plain(model.metadata.get(f"{name}.rope.dimension_sections", np.zeros(0)))[:3]
        rope = text.get("rope_scaling") or {"rope_type": "default"}
        own = {"image_token_id": token_id(model, "<|image_pad|>", "stands for pictures")}
        return own, {"rope_scaling": {**rope, "mrope_section": sections, "mrope_interleaved": True}}
