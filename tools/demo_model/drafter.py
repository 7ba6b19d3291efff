"""An EAGLE-3 drafter for training (arXiv 2503.01840): one layer that predicts tokens from a model's hidden states.

At column i it gets token i + 1 and the model's hidden states at token i after some of its layers, and predicts token i
+ 2; then its own result replaces the model's, column by column, as in drafting ("training-time test"). Its token table
and head are the model's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """The layer's dimensions, named as in Llama's config; `layers` of the model are read, counted from 1."""

    vocab_size: int = 640
    hidden_size: int = 256
    intermediate_size: int = 128
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    layers: tuple[int, ...] = (2, 3, 4)


class Drafter(nn.Module):
    """See above. Tensors of the model are `[rows, tokens, hidden_size]`."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        hidden, inner = shape.hidden_size, shape.intermediate_size
        q_size = shape.num_attention_heads * shape.head_dim
        kv_size = shape.num_key_value_heads * shape.head_dim

        def matrix(*size: int, gain: float = 0.5) -> nn.Parameter:
            return nn.Parameter(torch.randn(*size) * gain * size[-1] ** -0.5)

        self.fc = matrix(hidden, hidden * len(shape.layers))
        self.query = matrix(q_size, 2 * hidden)
        self.key_value = matrix(2, kv_size, 2 * hidden)
        self.output = matrix(hidden, q_size, gain=0.1)
        self.gate_up = matrix(2, inner, hidden)
        self.down = matrix(hidden, inner, gain=0.1)
        self.embed_norm, self.hidden_norm, self.mlp_norm, self.final_norm = (
            nn.Parameter(torch.ones(hidden)) for _ in range(4)
        )
        inverse = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.outer(torch.arange(shape.max_position_embeddings + 64), inverse).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def matrices(self) -> dict[str, nn.Parameter]:
        """The parameters that Muon updates."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.ndim >= 2}

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.shape.rms_norm_eps) * weight

    def _heads(self, x: Tensor, positions: Tensor | None) -> Tensor:
        """[rows, tokens, width] -> [rows, heads, tokens, head_dim], rotated at `positions` [rows, tokens]."""
        heads = x.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
        if positions is None:
            return heads
        return rotated(heads, self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1))

    def steps(
        self, token_ids: Tensor, kept: list[Tensor], embedding: Tensor, columns: Tensor, num_steps: int
    ) -> Iterator[Tensor]:
        """Each step's input of the head, `[rows, columns, hidden_size]`.

        token_ids  [rows, tokens]
        kept       hidden states after each of `shape.layers`, of the same tokens
        columns    [rows, columns] that are drafted from: each below tokens - 1, sorted or not
        """
        shape, tokens = self.shape, token_ids.shape[1] - 1
        groups = shape.num_attention_heads // shape.num_key_value_heads
        fused = F.linear(torch.cat([each[:, :tokens] for each in kept], -1), self.fc)
        embedded = self._norm(F.embedding(token_ids, embedding), self.embed_norm)
        places = torch.arange(tokens).expand(len(token_ids), -1)
        both = torch.cat((embedded[:, 1:], self._norm(fused, self.hidden_norm)), -1)
        k, v = F.linear(both, self.key_value[0]), F.linear(both, self.key_value[1])
        keys, values = (
            x.repeat_interleave(groups, 1) for x in (self._heads(k, places), self._heads(v, None))
        )  # [rows, heads, tokens, head_dim]
        at = columns.unsqueeze(-1).expand(-1, -1, shape.hidden_size)
        hidden = fused.gather(1, at)
        unseen = places.unsqueeze(1) > columns.unsqueeze(-1)  # [rows, columns, tokens]
        own_keys: list[Tensor] = []  # of the steps after the first: [rows, heads, columns, head_dim]
        own_values: list[Tensor] = []
        for step in range(num_steps):
            ahead = (columns + 1 + step).clamp(max=tokens)
            x = embedded.gather(1, ahead.unsqueeze(-1).expand_as(hidden))
            both = torch.cat((x, self._norm(hidden, self.hidden_norm)), -1)
            q = self._heads(F.linear(both, self.query), columns + step)
            if step:
                k, v = F.linear(both, self.key_value[0]), F.linear(both, self.key_value[1])
                own_keys.append(self._heads(k, columns + step).repeat_interleave(groups, 1))
                own_values.append(self._heads(v, None).repeat_interleave(groups, 1))
            scores = (q @ keys.mT).masked_fill(unseen.unsqueeze(1), float("-inf"))
            own = [(q * k).sum(-1, keepdim=True) for k in own_keys]
            weights = torch.cat([scores, *own], -1).mul(shape.head_dim**-0.5).softmax(-1)
            attended = weights[..., :tokens] @ values
            for number, v in enumerate(own_values):
                attended = attended + weights[..., tokens + number, None] * v
            hidden = hidden + F.linear(attended.transpose(1, 2).flatten(2), self.output)
            gate, up = F.linear(self._norm(hidden, self.mlp_norm), self.gate_up.flatten(0, 1)).chunk(2, -1)
            hidden = hidden + F.linear(F.silu(gate) * up, self.down)
            yield self._norm(hidden, self.final_norm)

    def checkpoint(self) -> dict[str, Tensor]:
        """The weights in bf16 under the names of published EAGLE-3 checkpoints."""
        state = {
            "fc": self.fc,
            "midlayer.self_attn.q_proj": self.query,
            "midlayer.self_attn.k_proj": self.key_value[0],
            "midlayer.self_attn.v_proj": self.key_value[1],
            "midlayer.self_attn.o_proj": self.output,
            "midlayer.mlp.gate_proj": self.gate_up[0],
            "midlayer.mlp.up_proj": self.gate_up[1],
            "midlayer.mlp.down_proj": self.down,
            "midlayer.input_layernorm": self.embed_norm,
            "midlayer.hidden_norm": self.hidden_norm,
            "midlayer.post_attention_layernorm": self.mlp_norm,
            "norm": self.final_norm,
        }
        return {f"{name}.weight": w.detach().to(torch.bfloat16).contiguous().clone() for name, w in state.items()}


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [rows, heads, tokens, head_dim] turned, each pair of halves by its token's angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
