"""The demo model with a tower for training: a small reimplementation of Qwen3-VL with the demo model's decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.mrope import interleaved_axes
from models.towers.qwen3_vl import patch_places
from tools.demo_model.drawing import NUM_MARKS
from tools.demo_model.model import DemoModel, Shape, rotated

_EPS = 1e-6


TEXT = Shape(vocab_size=512, hidden_size=128, intermediate_size=320, num_attention_heads=4, num_key_value_heads=2)


@dataclass(frozen=True, slots=True)
class VisionShape:
    """The tower's dimensions, named as in Qwen3-VL's config, and its language model's."""

    text: Shape = TEXT
    mrope_section: tuple[int, int, int] = (6, 5, 5)
    hidden_size: int = 128
    intermediate_size: int = 256
    depth: int = 3
    num_heads: int = 4
    patch_size: int = 8
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    num_position_embeddings: int = 100
    deepstack_visual_indexes: tuple[int, ...] = (1,)


class Merger(nn.Module):
    """Merges a token's four patches into an embedding; normalised together, or each alone."""

    def __init__(self, shape: VisionShape, *, norms_tokens: bool) -> None:
        super().__init__()
        self.inputs, out = shape.hidden_size * shape.spatial_merge_size**2, shape.text.hidden_size
        self.norm = nn.LayerNorm(self.inputs if norms_tokens else shape.hidden_size, _EPS)
        self.linear_fc1 = nn.Linear(self.inputs, self.inputs)
        self.linear_fc2 = nn.Linear(self.inputs, out)
        self.norms_tokens = norms_tokens

    def forward(self, x: Tensor) -> Tensor:
        """[pictures, patches, hidden_size] -> [pictures, tokens, out]"""
        tokens = x.shape[0], -1, self.inputs
        x = self.norm(x.reshape(tokens)) if self.norms_tokens else self.norm(x).reshape(tokens)
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


class Tower(nn.Module):
    """The tower. Its patch kernel has one frame: both frames of a still picture are equal, and share its weight."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.shape = shape
        layers, hidden, inner = shape.depth, shape.hidden_size, shape.intermediate_size

        def matrix(*size: int, gain: float) -> nn.Parameter:
            return nn.Parameter(torch.randn(layers, *size) * gain * size[-1] ** -0.5)

        self.patch_embed = nn.Linear(3 * shape.patch_size**2, hidden)
        self.pos_embed = nn.Parameter(torch.randn(shape.num_position_embeddings, hidden) * 0.02)
        self.qkv = matrix(3, hidden, hidden, gain=0.5)
        self.proj = matrix(hidden, hidden, gain=0.1)
        self.fc1 = matrix(inner, hidden, gain=0.5)
        self.fc2 = matrix(hidden, inner, gain=0.1)
        self.qkv_bias = nn.Parameter(torch.zeros(layers, 3 * hidden))
        self.proj_bias, self.fc2_bias = (nn.Parameter(torch.zeros(layers, hidden)) for _ in range(2))
        self.fc1_bias = nn.Parameter(torch.zeros(layers, inner))
        self.norm_weight = nn.Parameter(torch.ones(layers, 2, hidden))
        self.norm_bias = nn.Parameter(torch.zeros(layers, 2, hidden))
        self.merger = Merger(shape, norms_tokens=False)
        self.deepstack = nn.ModuleList(Merger(shape, norms_tokens=True) for _ in shape.deepstack_visual_indexes)

    def matrices(self) -> list[nn.Parameter]:
        """The parameters that Muon updates."""
        return [self.qkv, self.proj, self.fc1, self.fc2]  # a merger's gradient is large for the few tokens that it sees

    def forward(self, patches: Tensor, grid: tuple[int, int]) -> tuple[Tensor, list[Tensor]]:
        """Patches [pictures, rows * columns, 3 * patch_size ** 2] of one grid -> embeddings [pictures, tokens, out],
        and the rows added after the language model's first layers."""
        shape, pictures = self.shape, patches.shape[0]
        rows, columns = patch_places(grid, shape.spatial_merge_size)
        taps, weights = _taps(rows, columns, grid, round(shape.num_position_embeddings**0.5))
        x = self.patch_embed(patches) + (self.pos_embed[taps] * weights[..., None]).sum(0)
        head_dim = shape.hidden_size // shape.num_heads
        inverse = 10000.0 ** (-torch.arange(0, head_dim // 2, 2) / (head_dim // 2))
        angles = torch.cat([torch.from_numpy(each)[:, None] * inverse for each in (rows, columns)], 1).repeat(1, 2)
        cos, sin = angles.cos(), angles.sin()
        deep: list[Tensor] = []
        for layer in range(shape.depth):
            weight, bias = self.norm_weight[layer], self.norm_bias[layer]
            h = F.layer_norm(x, x.shape[-1:], weight[0], bias[0], _EPS)
            qkv = F.linear(h, self.qkv[layer].flatten(0, 1), self.qkv_bias[layer])
            q, k, v = qkv.view(pictures, -1, 3, shape.num_heads, head_dim).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v)
            x = x + F.linear(attended.transpose(1, 2).flatten(2), self.proj[layer], self.proj_bias[layer])
            h = F.layer_norm(x, x.shape[-1:], weight[1], bias[1], _EPS)
            h = F.gelu(F.linear(h, self.fc1[layer], self.fc1_bias[layer]), approximate="tanh")
            x = x + F.linear(h, self.fc2[layer], self.fc2_bias[layer])
            if layer in shape.deepstack_visual_indexes:
                deep.append(self.deepstack[len(deep)](x))
        return self.merger(x), deep

    def checkpoint(self, root: str) -> dict[str, Tensor]:
        """The weights under Qwen3-VL's names, below `root`."""
        shape = self.shape
        kernel = self.patch_embed.weight.unflatten(1, (3, 1, shape.patch_size, shape.patch_size))
        frames = shape.temporal_patch_size
        state: dict[str, Tensor] = {
            "patch_embed.proj.weight": (kernel / frames).expand(-1, -1, frames, -1, -1),
            "patch_embed.proj.bias": self.patch_embed.bias, "pos_embed.weight": self.pos_embed,
        }  # fmt: skip
        deepstack = {f"deepstack_merger_list.{index}": each for index, each in enumerate(self.deepstack)}
        for name, merger in {"merger": self.merger, **deepstack}.items():
            state |= {f"{name}.{key}": value for key, value in merger.state_dict().items()}
        for layer in range(shape.depth):
            linears = {
                "attn.qkv": (self.qkv[layer].flatten(0, 1), self.qkv_bias[layer]),
                "attn.proj": (self.proj[layer], self.proj_bias[layer]),
                "mlp.linear_fc1": (self.fc1[layer], self.fc1_bias[layer]),
                "mlp.linear_fc2": (self.fc2[layer], self.fc2_bias[layer]),
                "norm1": (self.norm_weight[layer, 0], self.norm_bias[layer, 0]),
                "norm2": (self.norm_weight[layer, 1], self.norm_bias[layer, 1]),
            }
            for name, (weight, bias) in linears.items():
                state |= {f"blocks.{layer}.{name}.weight": weight, f"blocks.{layer}.{name}.bias": bias}
        return {
            f"{root}.{name}": value.detach().to(torch.bfloat16).contiguous().clone() for name, value in state.items()
        }


class VisionModel(nn.Module):
    """Reads rows of tokens with pictures among them. `marks` classifies the object at each of the tower's embeddings,
    for training only."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.shape = shape
        self.text, self.tower = DemoModel(shape.text), Tower(shape)
        self.marks = nn.Linear(shape.text.hidden_size, NUM_MARKS)
        half = shape.text.head_dim // 2
        inverse = shape.text.rope_theta ** (-torch.arange(half) / half)
        self.register_buffer("inverse", inverse, persistent=False)
        self.register_buffer("axes", torch.from_numpy(interleaved_axes(shape.mrope_section, half)), persistent=False)

    def forward(
        self, token_ids: Tensor, is_picture: Tensor, positions: Tensor, patches: Tensor, grid: tuple[int, int]
    ) -> Tensor:
        """Final hidden states [rows, tokens, hidden_size].

        is_picture  [rows, tokens]: where the tokens of pictures are, in the order of `patches`
        positions   [3, rows, tokens]
        """
        embeddings, deep = self.tower(patches, grid)
        x = F.embedding(token_ids, self.text.embedding)
        x = x.masked_scatter(is_picture[..., None], embeddings)
        added = [torch.zeros_like(x).masked_scatter(is_picture[..., None], each) for each in deep]
        turned = positions[self.axes].permute(1, 2, 0) * self.inverse  # [rows, tokens, pairs]
        angles = turned.repeat(1, 1, 2)[:, None]
        return self.text.decode(x, angles.cos(), angles.sin(), added)


def _taps(
    rows: np.ndarray[Any, Any], columns: np.ndarray[Any, Any], grid: tuple[int, int], side: int
) -> tuple[Tensor, Tensor]:
    """The four learned positions that each patch reads, and their weights: [4, patches]."""
    lines = [rows * (side - 1) / max(1, grid[0] - 1), columns * (side - 1) / max(1, grid[1] - 1)]
    low = [np.floor(each).astype(np.int64) for each in lines]
    part = [each - floor for each, floor in zip(lines, low, strict=True)]
    ids, weights = [], []
    for down in (0, 1):
        for right in (0, 1):
            ids.append(np.minimum(low[0] + down, side - 1) * side + np.minimum(low[1] + right, side - 1))
            weights.append((part[0] if down else 1 - part[0]) * (part[1] if right else 1 - part[1]))
    return torch.from_numpy(np.stack(ids)), torch.from_numpy(np.stack(weights).astype(np.float32))
