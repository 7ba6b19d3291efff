"""The files of Gemma 4's towers (`models.towers.gemma4`): E2B's, E4B's, 26B-A4B's and 31B's, and 12B's map of pixels.

llama.cpp's converter writes neither the patches of a token's side, 3 unless a file says otherwise, nor whether a
picture's tokens see each other: they do, but for models whose layers have inputs of their own (E2B, E4B). Pixels of
patches are stored plane by plane, and in safetensors the channels of each together. Tensors and keys of an audio
encoder in the same file are passed over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from models.checkpoints.stored_tensor import StoredTensor
from models.configuration.json_fields import Fields
from models.gguf.projector import Projector, token_id
from models.gguf.reader import GgufFile
from models.gguf.weights import GgufWeight, Rearranged

_TABLE = "v.position_embd.weight"
_AUDIO = ("a.", "mm.a.")
_PROJECTION = {"mm.input_projection.weight": "model.embed_vision.embedding_projection.weight"}
_FRAME = {"image": "<|image|>", "boi": "<|image>", "eoi": "<image|>"}
_LAYER = {
    "ln1": "input_layernorm", "attn_post_norm": "post_attention_layernorm", "ln2": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}  # fmt: skip
_LAYER_MAPS = {
    **{f"attn_{theirs}": f"self_attn.{ours}_proj" for theirs, ours in zip(("q", "k", "v", "out"), "qkvo", strict=True)},
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


class _Gemma4Projector(Projector):
    """See `Projector`."""

    model_type: str
    table_size: str
    """The field of the number of positions that have embeddings."""

    @property
    def merge_size(self) -> int:
        """Patches of a token's side."""
        return int(self._fields.integer("clip.vision.projector.scale_factor", 3))

    def vision_config(self) -> dict[str, Any]:
        fields, table = self._fields, self.file.tensors.get(_TABLE)  # [2, positions, width]
        fields.expect("clip.use_gelu", True)
        fields.expect("clip.use_silu", False)
        return {
            "model_type": f"{self.model_type}_vision", **self.sizes({"patch_size": "patch_size"}),
            "pooling_kernel_size": self.merge_size,
            "rms_norm_eps": fields.number("clip.vision.attention.layer_norm_epsilon", 1e-6),
            **({} if table is None or len(table.shape) != 3 else {self.table_size: table.shape[1]}),
        }  # fmt: skip

    def preprocessor(self) -> Fields:
        sizes = {**self.sizes({"patch_size": "patch_size"}), "pooling_kernel_size": self.merge_size}
        return Fields(sizes, str(self.file.path))

    def text_changes(self, text: Mapping[str, Any], model: GgufFile) -> tuple[dict[str, Any], dict[str, Any]]:
        own = {
            f"{name}_token_id": token_id(model, token, "stands for pictures or beside them")
            for name, token in _FRAME.items()
        }
        sees_all = not text["hidden_size_per_layer_input"]
        return own, {
            "model_type": f"{self.model_type}_text",
            "use_bidirectional_attention": "vision" if sees_all else None,
            "pad_token_id": model.metadata.get("tokenizer.ggml.padding_token_id", 0),
        }

    def tensors(self) -> dict[str, StoredTensor]:
        return dict(self._tensor(name) for name in self.file.tensors if not name.startswith(_AUDIO))

    def _tensor(self, name: str) -> tuple[str, StoredTensor]:
        raise NotImplementedError

    def _weight(self, name: str) -> GgufWeight:
        return GgufWeight(self.file, name)

    def _number(self, name: str) -> StoredTensor:
        """A number that is stored as a vector of one."""
        weight = self._weight(name)
        return Rearranged(weight, (), lambda array: array) if weight.shape == (1,) else weight

    def _pixels(self, name: str) -> StoredTensor:
        """A tensor whose last sizes are those of three planes of pixels."""
        weight = self._weight(name)
        rows, columns = weight.shape[:-1][:1], math.prod(weight.shape[1:] or weight.shape)
        if columns % 3:
            return weight
        return Rearranged(weight, (*rows, columns), lambda array: array.reshape(-1, 3, columns // 3).swapaxes(1, 2))


class Gemma4TowerProjector(_Gemma4Projector):
    """A tower of layers."""

    model_type, table_size = "gemma4", "position_embedding_size"

    def vision_config(self) -> dict[str, Any]:
        names = self.file.tensors
        return {
            **super().vision_config(),
            **self.sizes({
                "block_count": "num_hidden_layers", "embedding_length": "hidden_size",
                "attention.head_count": "num_attention_heads", "feed_forward_length": "intermediate_size",
            }),
            "use_clipped_linears": any(name.endswith(_BOUNDS) for name in names if not name.startswith(_AUDIO)),
            "standardize": "v.std_bias" in names,
        }  # fmt: skip

    def _tensor(self, name: str) -> tuple[str, StoredTensor]:
        parts = name.split(".")
        if name == "v.patch_embd.weight":
            return "model.vision_tower.patch_embedder.input_proj.weight", self._pixels(name)
        if name == _TABLE:
            return "model.vision_tower.patch_embedder.position_embedding_table", self._weight(name)
        if name in ("v.std_bias", "v.std_scale"):
            return f"model.vision_tower.{parts[1]}", self._weight(name)
        if parts[:2] == ["v", "blk"] and len(parts) == 5:
            layer, (part, kind) = f"model.vision_tower.encoder.layers.{parts[2]}", parts[3:]
            if part in _LAYER:
                return f"{layer}.{_LAYER[part]}.{kind}", self._weight(name)
            if part in _LAYER_MAPS and kind in _BOUNDS:
                return f"{layer}.{_LAYER_MAPS[part]}.{kind}", self._number(name)
            if part in _LAYER_MAPS:
                return f"{layer}.{_LAYER_MAPS[part]}.linear.{kind}", self._weight(name)
        return _PROJECTION.get(name, name), self._weight(name)


class Gemma4PixelMapProjector(_Gemma4Projector):
    """12B's map of a token's pixels."""

    model_type, table_size = "gemma4_unified", "mm_posemb_size"

    def vision_config(self) -> dict[str, Any]:
        common = super().vision_config()
        sizes = self.sizes({"embedding_length": "mm_embed_dim"})
        return {
            **common, **sizes, "output_proj_dims": sizes["mm_embed_dim"],
            "model_patch_size": common["patch_size"] * common["pooling_kernel_size"],
        }  # fmt: skip

    def _tensor(self, name: str) -> tuple[str, StoredTensor]:
        own, kind = "model.vision_embedder", name.rpartition(".")[2]
        if name == _TABLE:
            table = self._weight(name)
            axes, *rest = table.shape
            if len(rest) != 2:
                return f"{own}.pos_embedding", table
            return f"{own}.pos_embedding", Rearranged(table, (rest[0], axes, rest[1]), lambda each: each.swapaxes(0, 1))
        if name in ("v.patch_norm.1.weight", "v.patch_norm.1.bias"):
            return f"{own}.patch_ln1.{kind}", self._pixels(name)
        if name == "v.patch_embd.weight":
            return f"{own}.patch_dense.weight", self._pixels(name)
        others = {"v.patch_embd": "patch_dense", "v.patch_norm.2": "patch_ln2", "v.patch_norm.3": "pos_norm"}
        if (stem := name.rpartition(".")[0]) in others:
            return f"{own}.{others[stem]}.{kind}", self._weight(name)
        return _PROJECTION.get(name, name), self._weight(name)
