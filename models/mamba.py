"""Mamba-2 mixers (https://arxiv.org/abs/2405.21060) in place of attention, and decoders that have some.

    gate, (x, B, C), dt = in(h);   y = out(norm(scan(conv(x, B, C), dt) * silu(gate)))

`runtime.ops.mamba` computes all between the maps. Ranks share out the heads with their groups of B and C, which are
also the parts of the norm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.base import Model
from models.configuration.json_fields import Fields
from models.experts import MoeConfig
from models.makers.maker import Maker
from models.makers.shards import Shard, equal_shard
from runtime import ops
from runtime.batch import Batch
from runtime.kv.cache import KVCache
from runtime.kv.forms import Recurrent
from runtime.linear.norm import RmsNorm
from runtime.linear.recurrent import Mamba
from runtime.tensor.tensor import Tensor

MAMBA, ATTENTION, EXPERTS, MLP = "linear_attention", "full_attention", "moe", "mlp"
_INFINITY = {"__float__": "Infinity"}  # as transformers 5 writes it
_OLDER_NAMES = {"mamba": MAMBA, "attention": ATTENTION}


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaForm:
    """Sizes of a mixer.

    Attributes:
        head_dim, state_size: of a head.
        taps: tokens that the convolution sees, a token's own included.
        has_conv_bias, has_bias: whether the convolution, and the maps around it, have biases.
        dt_limit: the least and the largest step.
    """

    head_dim: int
    state_size: int
    taps: int
    has_conv_bias: bool
    has_bias: bool
    dt_limit: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig(MoeConfig):
    """A decoder with Mamba-2 layers, perhaps with experts.

    Attributes:
        mamba_heads, mamba_groups: heads of a mixer, and groups of B and C.
        mamba: its other sizes.
        kinds: of each layer.
    """

    recurrence = "mamba"
    mamba_heads: int
    mamba_groups: int
    mamba: MambaForm
    kinds: tuple[str, ...]

    def head_shards(self, rank: int, num_ranks: int) -> dict[str, Shard | None]:
        """See `ModelConfig`. A group's norm is not split."""
        shards = MoeConfig.head_shards(self, rank, num_ranks)
        if MAMBA in self.kinds:
            for name in ("mamba_groups", "mamba_heads"):
                shards[name] = equal_shard(getattr(self, name) // num_ranks, rank, num_ranks)
        return shards


class MambaMixer:
    """A mixer between its maps, after a norm."""

    def __init__(self, config: MambaConfig, index: int, maker: Maker, norm: RmsNorm | None) -> None:
        form, hidden, self.index = config.mamba, config.hidden_size, index
        heads, groups = config.shard("mamba_heads"), config.shard("mamba_groups")
        inner, states = heads.times(form.head_dim), groups.times(form.state_size)
        convolved = inner, states, states
        self.in_proj = maker.linear(
            "in_proj", outputs=(inner, *convolved, heads), inputs=hidden, has_bias=form.has_bias, split="outputs",
            norm=norm,
        )  # fmt: skip
        self.weights = Mamba(
            conv=maker.taps("conv1d", convolved, form.taps),
            conv_bias=maker.taps("conv1d", convolved, 0).view(-1) if form.has_conv_bias else None,
            a=maker.decay("A_log", heads), dt_bias=maker.exact_vector("dt_bias", heads),
            d=maker.exact_vector("D", heads), norm=maker.vector("norm.weight", inner), eps=config.norm_eps,
            num_heads=heads.count, head_dim=form.head_dim, num_groups=groups.count, state_size=form.state_size,
            norm_groups=groups.count, dt_limit=form.dt_limit,
        )  # fmt: skip
        self.out_proj = maker.linear("out_proj", outputs=hidden, inputs=inner, has_bias=form.has_bias, split="inputs")

    def __call__(self, x: Tensor, batch: Batch, kv_cache: KVCache, *, residual: Tensor | None = None) -> Tensor:
        pages, group = kv_cache.layer(self.index), kv_cache.group_of(self.index)
        y = ops.mamba(self.in_proj(x, batch), self.weights, pages=pages, batch=batch, group=group)
        return self.out_proj(y, batch, residual=residual)


class MambaModel(Model):
    """A model with Mamba-2 layers: their pages."""

    config: MambaConfig

    def state_form(self, index: int) -> Recurrent | None:
        config, form = self.config, self.config.mamba
        if config.kinds[index] != MAMBA:
            return None
        channels = config.mamba_heads * form.head_dim + 2 * config.mamba_groups * form.state_size
        return Recurrent(
            channels=channels, taps=form.taps, gates=config.mamba_heads, heads=config.mamba_heads, rows=form.state_size,
            columns=form.head_dim, activations=self.activations,
        )  # fmt: skip


def read_kinds(fields: Fields, names: tuple[str, ...], known: tuple[str, ...]) -> tuple[str, ...]:
    """The kind of each layer by the one of the fields `names` that is given, () if none is; older names are known."""
    given = {name: kinds for name in names if (kinds := fields.strings(name)) is not None}
    for name, kinds in given.items():
        found = tuple(_OLDER_NAMES.get(kind, kind) for kind in kinds)
        if unknown := {*found} - {*known}:
            raise fields.error(name, f"has {min(unknown)!r:.80}, which must be one of {', '.join(known)}")
        if kinds != next(iter(given.values())):
            raise fields.error(name, f"contradicts {next(iter(given))}")
    return tuple(_OLDER_NAMES.get(kind, kind) for kind in next(iter(given.values()), ()))


def read_dt_limit(fields: Fields) -> tuple[float, float]:
    """`time_step_limit`, two numbers of which the second may be infinite; null means no limit."""
    given = fields.raw("time_step_limit")
    if given is None:
        return 0.0, math.inf
    if isinstance(given, list):
        given = [math.inf if each == _INFINITY else each for each in given]
    is_pair = isinstance(given, list) and len(given) == 2 and all(type(each) in (int, float) for each in given)
    if not is_pair or not 0.0 <= given[0] <= given[1]:
        raise fields.error("time_step_limit", f"must be two numbers that rise from 0 or more, not {given!r:.80}")
    return float(given[0]), float(given[1])


def mamba_sizes(fields: Fields, names: Mapping[str, str], defaults: Mapping[str, int]) -> dict[str, Any]:
    """Heads and groups, and the sizes of `MambaForm`, by their names in the file."""
    sizes = {own: fields.integer(name, defaults[own], most=1 << 16) for own, name in names.items()}
    heads, groups = sizes.pop("mamba_heads"), sizes.pop("mamba_groups")
    if heads % groups:
        problem = f"= {groups} must divide {names['mamba_heads']} = {heads}"
        raise fields.error(names["mamba_groups"], problem)
    return {"mamba_heads": heads, "mamba_groups": groups, **sizes}
