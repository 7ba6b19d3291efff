"""The demo model for training: a small reimplementation of Qwen3 in torch. The same matrix of all layers lies in one
stacked parameter, so that Muon's iteration is one batched product."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    """The model's dimensions, named as in Qwen3's config."""

    vocab_size: int = 640
    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


class DemoModel(nn.Module):
    """Qwen3 with each kind of weight stacked over layers: `[num_layers, ...]`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        layers, hidden, inner = shape.num_hidden_layers, shape.hidden_size, shape.intermediate_size
        query_size = shape.num_attention_heads * shape.head_dim
        kv_size = shape.num_key_value_heads * shape.head_dim

        def matrix(*size: int, gain: float) -> nn.Parameter:
            return nn.Parameter(torch.randn(layers, *size) * gain * size[-1] ** -0.5)

        self.embedding = nn.Parameter(torch.randn(shape.vocab_size, hidden) * 0.02)
        self.query = matrix(query_size, hidden, gain=0.5)
        self.key_value = matrix(2, kv_size, hidden, gain=0.5)
        self.output = matrix(hidden, query_size, gain=0.1)
        self.gate_up = matrix(2, inner, hidden, gain=0.5)
        self.down = matrix(hidden, inner, gain=0.1)
        self.query_norm = nn.Parameter(torch.ones(layers, shape.head_dim))
        self.key_norm = nn.Parameter(torch.ones(layers, shape.head_dim))
        self.attention_norm = nn.Parameter(torch.ones(layers, hidden))
        self.mlp_norm = nn.Parameter(torch.ones(layers, hidden))
        self.final_norm = nn.Parameter(torch.ones(hidden))
        inverse = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.outer(torch.arange(shape.max_position_embeddings), inverse).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)  # [max_positions, head_dim]
        self.register_buffer("sin", angles.sin(), persistent=False)

    def matrices(self) -> list[nn.Parameter]:
        """The parameters that Muon updates."""
        return [self.query, self.key_value, self.output, self.gate_up, self.down]

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.shape.rms_norm_eps) * weight

    def forward(self, token_ids: Tensor) -> Tensor:
        """Token ids [rows, tokens] to final hidden states [rows, tokens, hidden_size]."""
        tokens = token_ids.shape[1]
        return self.decode(F.embedding(token_ids, self.embedding), self.cos[:tokens], self.sin[:tokens], [])

    def decode(
        self, x: Tensor, cos: Tensor, sin: Tensor, added: list[Tensor], kept: list[Tensor] | None = None
    ) -> Tensor:
        """`x` [rows, tokens, hidden_size], rotated by `cos` and `sin` [..., tokens, head_dim]; after the first layers
        `added`, of the shape of `x`, is added. `kept` gets the hidden states after each layer."""
        shape, (rows, tokens, _) = self.shape, x.shape
        groups = shape.num_attention_heads // shape.num_key_value_heads
        norms = self.query_norm, self.key_norm, self.attention_norm, self.mlp_norm
        layers = zip(*(parameter.unbind(0) for parameter in (*self.matrices(), *norms)), strict=True)
        for index, (query, key_value, output, gate_up, down, *norm) in enumerate(layers):
            query_norm, key_norm, attention_norm, mlp_norm = norm
            normed = self._norm(x, attention_norm)
            q, kv = F.linear(normed, query), F.linear(normed, key_value.flatten(0, 1))
            # [rows, heads, tokens, head_dim]
            q, kv = (heads.view(rows, tokens, -1, shape.head_dim).transpose(1, 2) for heads in (q, kv))
            k, v = kv.chunk(2, dim=1)
            q, k = rotated(self._norm(q, query_norm), cos, sin), rotated(self._norm(k, key_norm), cos, sin)
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + F.linear(attended.transpose(1, 2).flatten(2), output)
            gate, up = F.linear(self._norm(x, mlp_norm), gate_up.flatten(0, 1)).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, down)
            if index < len(added):
                x = x + added[index]
            if kept is not None:
                kept.append(x)
        return self._norm(x, self.final_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embedding)

    def checkpoint(self, root: str = "model") -> dict[str, Tensor]:
        """The weights in bf16 under Hugging Face's names, below `root`."""
        state = {f"{root}.embed_tokens.weight": self.embedding, f"{root}.norm.weight": self.final_norm}
        for layer in range(self.shape.num_hidden_layers):
            state |= {
                f"{root}.layers.{layer}.{name}.weight": weight[layer]
                for name, weight in {
                    "self_attn.q_proj": self.query,
                    "self_attn.k_proj": self.key_value[:, 0],
                    "self_attn.v_proj": self.key_value[:, 1],
                    "self_attn.o_proj": self.output,
                    "self_attn.q_norm": self.query_norm,
                    "self_attn.k_norm": self.key_norm,
                    "mlp.gate_proj": self.gate_up[:, 0],
                    "mlp.up_proj": self.gate_up[:, 1],
                    "mlp.down_proj": self.down,
                    "input_layernorm": self.attention_norm,
                    "post_attention_layernorm": self.mlp_norm,
                }.items()
            }
        return {name: weight.detach().to(torch.bfloat16).contiguous().clone() for name, weight in state.items()}

    def load(self, tensors: Mapping[str, Tensor], root: str = "model") -> None:
        """Loads the weights of a `checkpoint`."""

        def stacked(name: str) -> Tensor:
            layers = range(self.shape.num_hidden_layers)
            return torch.stack([tensors[f"{root}.layers.{layer}.{name}.weight"] for layer in layers]).float()

        attention, mlp = "self_attn", "mlp"
        found = {
            self.embedding: tensors[f"{root}.embed_tokens.weight"],
            self.final_norm: tensors[f"{root}.norm.weight"],
            self.query: stacked(f"{attention}.q_proj"),
            self.key_value: torch.stack([stacked(f"{attention}.{name}_proj") for name in "kv"], 1),
            self.output: stacked(f"{attention}.o_proj"),
            self.query_norm: stacked(f"{attention}.q_norm"),
            self.key_norm: stacked(f"{attention}.k_norm"),
            self.gate_up: torch.stack([stacked(f"{mlp}.{name}_proj") for name in ("gate", "up")], 1),
            self.down: stacked(f"{mlp}.down_proj"),
            self.attention_norm: stacked("input_layernorm"),
            self.mlp_norm: stacked("post_attention_layernorm"),
        }
        for parameter, value in found.items():
            parameter.data = value.float()

    def round_to_bf16(self) -> None:
        """Rounds the weights to the saved ones."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(torch.bfloat16).to(torch.float32)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [rows, heads, tokens, head_dim] turned, each pair of halves by its token's angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
