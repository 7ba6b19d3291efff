"""gpt-oss, small and for training: each kind of weight stacked over layers, experts chosen two of eight.

Rows are settings followed by branches (`harmony_tasks`): a branch's tokens see its setting and itself, at positions
after the setting, as if each conversation were computed alone. Maps run over real tokens; only attention has padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK = 32  # weights that share a scale in MXFP4
IGNORED = -100  # no target
_STEP = 256  # numbers of rows are rounded up, to compile few sizes of products
GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_MIDDLES = (GRID[1:] + GRID[:-1]) / 2
_ALPHA, _LIMIT = 1.702, 7.0


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """The model's dimensions, named as in gpt-oss's config."""

    vocab_size: int = 768
    hidden_size: int = 192
    intermediate_size: int = 192
    num_hidden_layers: int = 4
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 32
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    sliding_window: int = 128
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    def window_of(self, layer: int) -> int | None:
        """The window of a layer; even ones have one."""
        return self.sliding_window if layer % 2 == 0 else None


@dataclass(frozen=True, slots=True)
class Batch:
    """Settings `[rows, prefix]` and branches `[rows, branches, length]`, as packed tokens and their places.

    Attributes:
        token_ids: of settings, of branches, and padding. [tokens]
        positions: [tokens]
        prefix_index, branch_index: their places in the padded arrays.
        prefix_lengths: [rows]
        sizes: rows, prefix, branches, length.
        predicting: indices of the tokens whose next one is a target, and that next one, or IGNORED. [targets] each
    """

    token_ids: Tensor
    positions: Tensor
    prefix_index: Tensor
    branch_index: Tensor
    prefix_lengths: Tensor
    sizes: tuple[int, int, int, int]
    predicting: Tensor
    targets: Tensor


def make_batch(settings: list[list[int]], branches: list[list[tuple[list[int], list[bool]]]]) -> Batch:
    """A batch of settings' token ids, each with as many branches: token ids, and which of them are targets."""
    rows, prefix = len(settings), _up(max(map(len, settings)), 16)
    count, length = len(branches[0]), _up(max(len(ids) for row in branches for ids, _ in row), 16)
    ids: list[int] = []
    positions: list[int] = []
    prefix_at: list[int] = []
    branch_at: list[int] = []
    predicting: list[int] = []
    targets: list[int] = []
    for row, setting in enumerate(settings):
        ids += setting
        positions += range(len(setting))
        prefix_at += range(row * prefix, row * prefix + len(setting))
    for row, setting in enumerate(settings):
        for number, (tokens, said) in enumerate(branches[row]):
            first = len(ids)
            predicting += [first + i for i in range(len(tokens) - 1) if said[i + 1]]
            targets += [tokens[i + 1] for i in range(len(tokens) - 1) if said[i + 1]]
            ids += tokens
            positions += range(len(setting), len(setting) + len(tokens))
            start = (row * count + number) * length
            branch_at += range(start, start + len(tokens))
    spare = _up(len(ids), _STEP) - len(ids)
    ids += [0] * spare
    positions += [0] * spare
    spare = _up(len(targets), _STEP) - len(targets)
    predicting += [0] * spare
    targets += [IGNORED] * spare
    return Batch(
        torch.tensor(ids), torch.tensor(positions), torch.tensor(prefix_at), torch.tensor(branch_at),
        torch.tensor([len(setting) for setting in settings]), (rows, prefix, count, length),
        torch.tensor(predicting), torch.tensor(targets),
    )  # fmt: skip


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def to_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes `[..., K]` (uint8, 0 to 15) and exponents `[..., K / 32]` of a weight `[..., K]`; no number is clipped."""
    groups = weight.unflatten(-1, (-1, BLOCK))
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(2.0**-100)
    exponent = torch.ceil(torch.log2(largest / 6.0))
    scaled = groups * torch.exp2(-exponent)
    codes = torch.bucketize(scaled.abs(), _MIDDLES) + 8 * (scaled < 0)
    return codes.flatten(-2).to(torch.uint8), exponent.squeeze(-1)


def from_mxfp4(codes: Tensor, exponent: Tensor) -> Tensor:
    """The weight of codes and exponents."""
    values = torch.cat((GRID, -GRID))[codes.int()].unflatten(-1, (-1, BLOCK))
    return (values * torch.exp2(exponent)[..., None]).flatten(-2)


def rounded(weight: Tensor) -> Tensor:
    """The weight rounded to MXFP4; gradients pass straight through."""
    with torch.no_grad():
        kept = from_mxfp4(*to_mxfp4(weight))
    return weight + (kept - weight).detach()


class ExpertsModel(nn.Module):
    """gpt-oss with each kind of weight stacked over layers: `[num_layers, ...]`. `rounds`: experts are in MXFP4."""

    def __init__(self, shape: ExpertsShape) -> None:
        super().__init__()
        self.shape = shape
        self.rounds = False
        layers, hidden, inner = shape.num_hidden_layers, shape.hidden_size, shape.intermediate_size
        experts = shape.num_local_experts
        query_size = shape.num_attention_heads * shape.head_dim
        kv_size = shape.num_key_value_heads * shape.head_dim

        def matrix(*size: int, gain: float) -> nn.Parameter:
            return nn.Parameter(torch.randn(layers, *size) * gain * size[-1] ** -0.5)

        def zeros(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(layers, *size))

        self.embedding = nn.Parameter(torch.randn(shape.vocab_size, hidden) * 0.02)
        self.query = matrix(query_size, hidden, gain=0.5)
        self.key_value = matrix(2, kv_size, hidden, gain=0.5)
        self.output = matrix(hidden, query_size, gain=0.1)
        self.gate = matrix(experts, inner, hidden, gain=0.5)
        self.up = matrix(experts, inner, hidden, gain=0.5)
        self.down = matrix(experts, hidden, inner, gain=0.1)
        self.query_bias, self.key_value_bias, self.output_bias = zeros(query_size), zeros(2, kv_size), zeros(hidden)
        self.gate_bias, self.up_bias = zeros(experts, inner), zeros(experts, inner)
        self.down_bias = zeros(experts, hidden)
        self.router, self.router_bias = matrix(experts, hidden, gain=0.5), zeros(experts)
        self.sinks = zeros(shape.num_attention_heads)
        self.attention_norm = nn.Parameter(torch.ones(layers, hidden))
        self.mlp_norm = nn.Parameter(torch.ones(layers, hidden))
        self.final_norm = nn.Parameter(torch.ones(hidden))
        inverse = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.outer(torch.arange(shape.max_position_embeddings), inverse).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)  # [max_positions, head_dim]
        self.register_buffer("sin", angles.sin(), persistent=False)

    def matrices(self) -> list[nn.Parameter]:
        """The parameters that Muon updates."""
        return [self.query, self.key_value, self.output, self.gate, self.up, self.down]

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits of the targets `[targets, vocabulary]`, and the imbalance of experts (1 if they are used evenly)."""
        shape = self.shape
        x = F.embedding(batch.token_ids, self.embedding)
        masks = {window: _masks(batch, window) for window in {shape.sliding_window, None}}
        uneven = x.new_zeros(())
        gates, ups, downs = (rounded(each) if self.rounds else each for each in (self.gate, self.up, self.down))
        for layer in range(shape.num_hidden_layers):
            normed = self._norm(x, self.attention_norm[layer])
            x = x + self._attention(layer, normed, batch, *masks[shape.window_of(layer)])
            normed = self._norm(x, self.mlp_norm[layer])
            mixed, evenness = self._experts(layer, normed, gates[layer], ups[layer], downs[layer])
            x, uneven = x + mixed, uneven + evenness / shape.num_hidden_layers
        return F.linear(self._norm(x[batch.predicting], self.final_norm), self.embedding), uneven

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.shape.rms_norm_eps) * weight

    def _attention(self, layer: int, x: Tensor, batch: Batch, prefix_mask: Tensor, branch_mask: Tensor) -> Tensor:
        shape = self.shape
        rows, prefix, count, length = batch.sizes
        split, head = len(batch.prefix_index), shape.head_dim
        end = split + len(batch.branch_index)
        cos, sin = self.cos[batch.positions][:, None], self.sin[batch.positions][:, None]

        def turned(heads: Tensor) -> Tensor:
            first, second = heads.chunk(2, dim=-1)
            return heads * cos + torch.cat((-second, first), dim=-1) * sin

        q = turned(F.linear(x, self.query[layer], self.query_bias[layer]).unflatten(-1, (-1, head)))
        kv = F.linear(x, self.key_value[layer].flatten(0, 1), self.key_value_bias[layer].flatten())
        k, v = kv.unflatten(-1, (-1, head)).chunk(2, dim=1)
        k = turned(k)
        groups = shape.num_attention_heads // shape.num_key_value_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)

        def padded(each: Tensor) -> tuple[Tensor, Tensor]:
            """[rows, heads, prefix, head], [rows, heads, branches, length, head]"""
            front = each.new_zeros(rows * prefix, *each.shape[1:]).index_copy(0, batch.prefix_index, each[:split])
            back = each.new_zeros(rows * count * length, *each.shape[1:])
            back = back.index_copy(0, batch.branch_index, each[split:end]).view(rows, count, length, -1, head)
            return front.view(rows, prefix, -1, head).transpose(1, 2), back.permute(0, 3, 1, 2, 4)

        (q0, q1), (k0, k1), (v0, v1) = padded(q), padded(k), padded(v)
        sink = self.sinks[layer][None, :, None, None]
        front = _attend(q0 @ k0.mT, prefix_mask, sink, head) @ v0
        scores = torch.cat(((q1.flatten(2, 3) @ k0.mT).unflatten(2, (count, length)), q1 @ k1.mT), dim=-1)
        shares = _attend(scores, branch_mask, sink[..., None], head)
        back = (shares[..., :prefix].flatten(2, 3) @ v0).unflatten(2, (count, length)) + shares[..., prefix:] @ v1
        front = front.transpose(1, 2).reshape(rows * prefix, -1)[batch.prefix_index]
        back = back.permute(0, 2, 3, 1, 4).reshape(rows * count * length, -1)[batch.branch_index]
        spare = front.new_zeros(len(x) - end, front.shape[-1])
        return F.linear(torch.cat((front, back, spare)), self.output[layer], self.output_bias[layer])

    def _experts(self, layer: int, x: Tensor, gates: Tensor, ups: Tensor, downs: Tensor) -> tuple[Tensor, Tensor]:
        shape = self.shape
        with torch.autocast("cpu", enabled=False):
            logits = F.linear(x, self.router[layer], self.router_bias[layer])
        chosen, experts = logits.topk(shape.num_experts_per_tok, dim=-1)
        weights = chosen.softmax(-1)
        out = torch.zeros_like(x)
        shares = []
        for expert in range(shape.num_local_experts):
            tokens, place = (experts == expert).nonzero(as_tuple=True)
            shares.append(len(tokens) / experts.numel())
            spare = _up(len(tokens), _STEP) - len(tokens)
            rows = F.pad(x[tokens], (0, 0, 0, spare))
            gate = F.linear(rows, gates[expert], self.gate_bias[layer, expert]).clamp(max=_LIMIT)
            up = F.linear(rows, ups[expert], self.up_bias[layer, expert]).clamp(-_LIMIT, _LIMIT)
            inner = (up + 1) * gate * torch.sigmoid(gate * _ALPHA)
            result = F.linear(inner, downs[expert], self.down_bias[layer, expert])[: len(tokens)].float()
            out = out.index_add(0, tokens, result * weights[tokens, place, None])
        uneven = shape.num_local_experts * (torch.tensor(shares) * logits.softmax(-1).mean(0)).sum()
        return out, uneven


def _masks(batch: Batch, window: int | None) -> tuple[Tensor, Tensor]:
    """Masks that are added to scores: of settings `[rows, 1, prefix, prefix]`, and of branches
    `[rows, 1, 1, length, prefix + length]`."""
    _, prefix, _, length = batch.sizes
    lengths = batch.prefix_lengths[:, None, None]
    at = torch.arange(prefix)
    front = (at[:, None] >= at)[None].expand(len(lengths), -1, -1)
    behind = lengths + torch.arange(length)[:, None]  # [rows, length, 1]
    to_front = (at < lengths).expand(-1, length, -1)
    own = torch.arange(length)
    to_own = (own[:, None] >= own)[None].expand(len(lengths), -1, -1)
    if window is not None:
        front = front & (at[:, None] - at < window)
        to_front = to_front & (behind - at < window)
        to_own = to_own & (own[:, None] - own < window)
    both = torch.cat((to_front, to_own), dim=-1)
    return tuple(torch.zeros(each.shape).masked_fill(~each, -1e9) for each in (front[:, None], both[:, None, None]))


def _attend(scores: Tensor, mask: Tensor, sink: Tensor, head: int) -> Tensor:
    """Attention with a sink, which takes a share of the softmax and adds no value."""
    scores = scores.float() * head**-0.5 + mask
    sinks = sink.expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
