"""The rotary position embeddings of a config, in both of its spellings.

Older files carry `rope_theta` and `rope_scaling: {"type" or "rope_type", "factor", ...}`; transformers 5
writes one object, `rope_parameters: {"rope_type", "rope_theta", "factor", ...}`. Both become the same
`RopeConfig`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from models.configuration.json_fields import Fields

_LEAST, _MOST = 1e-6, 1e12  # of any base or factor: far beyond all that is used, and far from float32's limits

_NO_ALIASES: Mapping[str, str] = {}
KINDS = ("default", "linear", "llama3", "yarn", "dynamic")  # those that any family may use
_NOTES = frozenset({"finetuned", "attn_factor", "mrope_section", "mrope_interleaved", "max_position_embeddings"})
"""Fields that rotate nothing: transformers reads none of them. Axes of positions (`mrope`) are one for text; a family
whose tokens have several reads them itself."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embeddings (Su et al. 2021).

    `kind` is one of:

    - "default".
    - "linear": positions divided by `factor` (Chen et al. 2023).
    - "llama3": low frequencies divided by `factor`, high ones kept, those between interpolated (Llama 3.1).
    - "yarn": pairs that turn more than `beta_fast` times over the original context stay, those that turn less than
      `beta_slow` times are stretched; cosine and sine are multiplied by `attention_factor` (Peng et al. 2023).
    - "longrope": each pair's frequency divided by its own factor, of `short_factors` in sequences within the original
      context, of `long_factors` in longer ones; cosine and sine are multiplied by `attention_factor`, in longer ones by
      `long_attention_factor` if that is given (Ding et al. 2024).
    - "proportional": the frequencies of all `head_dim` elements, of which `rotary_dim` are rotated, as pairs
      (i, i + head_dim / 2); positions divided by `factor` (Gemma 4).

    Factors that a kind does not use are 1; `original_max_position_embeddings`, in tokens, is 0 for default and linear.
    The first `rotary_dim` elements of each head are rotated, as pairs (i, i + rotary_dim / 2), or (2 i, 2 i + 1) if
    `interleaved`. Queries are then multiplied by `1 + q_scaling_beta log(1 + floor(position / original context))`,
    as in Llama 4.
    """

    theta: float
    rotary_dim: int
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    long_attention_factor: float | None = None
    interleaved: bool = False
    q_scaling_beta: float = 0.0
    head_dim: int = 0

    def reach(self, max_position_embeddings: int) -> int:
        """The tokens of the longest sequence that the rotation is made for, as in vLLM: YaRN and linear scaling stretch
        a context, which a file may name beside them or not (Qwen's files do not)."""
        if self.kind == "yarn":
            return max(max_position_embeddings, int(self.factor * self.original_max_position_embeddings))
        return int(max_position_embeddings * self.factor) if self.kind == "linear" else max_position_embeddings

    def switch(self, num_positions: int) -> int | None:
        """The length beyond which a sequence's tokens are all rotated otherwise, if sequences may have `num_positions`
        tokens; None if there is none."""
        original = self.original_max_position_embeddings
        return original if self.kind == "longrope" and num_positions > original else None


def rope_fields(fields: Fields, layer_type: str | None = None) -> Fields:
    """The rope object of a `config.json`, in either spelling, for a family's own fields in it.

    `layer_type` picks the entry of a layer type from `rope_parameters`, which families with several bases write so;
    their older `rope_scaling` has no entries.

    Raises `ConfigError` where the two spellings contradict each other.
    """
    new, old = fields.object("rope_parameters"), fields.object("rope_scaling")
    new.notes = old.notes = _NOTES
    if layer_type is not None and new.names():
        if old.names():
            raise fields.error("rope_scaling", "is given beside rope_parameters with an entry for each layer type")
        return new.object(layer_type)
    if not (new.names() and old.names()):
        return old if old.names() else new
    if _kind(new) != _kind(old):
        raise old.error("rope_type", f"is {_kind(old)!r}, but rope_parameters says {_kind(new)!r}")
    for name in {*new.names(), *old.names()} - {"type", "rope_type"}:
        left, right = new.raw(name), old.raw(name)
        if left is None or right is None:
            # A file with both spellings may lack the base in the older one, which had it outside of the object.
            if name == "rope_theta":
                continue
            given, other = ("rope_scaling", "rope_parameters") if left is None else ("rope_parameters", "rope_scaling")
            raise fields.error(given, f"has {name}, but {other} has not")
        if left != right:
            raise old.error(name, f"is {right!r:.80}, but rope_parameters says {left!r:.80}")
    return new


def parse_rope(
    fields: Fields,
    head_dim: int,
    max_position_embeddings: int,
    *,
    default_theta: float = 10_000.0,
    default_partial_rotary_factor: float | None = None,
    default_original_context: int | None = None,
    interleaved: bool = False,
    kinds: Sequence[str] = KINDS,
    aliases: Mapping[str, str] = _NO_ALIASES,
    layer_type: str | None = None,
    theta_name: str = "rope_theta",
) -> RopeConfig:
    """The rope fields of a `config.json`.

    Args:
        head_dim: elements of a head.
        max_position_embeddings: as the config says.
        default_theta: the base where the file gives none.
        default_partial_rotary_factor: the share of a head that is rotated where the file gives none. None means that
            the family rotates whole heads and refuses another share.
        default_original_context: `original_max_position_embeddings` where the file gives none, or None for
            `max_position_embeddings`.
        interleaved: which elements of a head make a pair; the family knows.
        kinds: those that the family supports.
        aliases: older names of kinds that the family's files have.
        layer_type: as `rope_fields` has it.
        theta_name: the field outside of the rope object that gives the base.

    Raises `ConfigError` for a kind that is not supported, a field that is missing or out of range, and where the two
    spellings contradict each other.
    """
    rope = rope_fields(fields, layer_type)
    theta = _inside_or_outside(rope, "rope_theta", fields, theta_name, default_theta)
    kind = _kind(rope)
    kind = aliases.get(kind, kind)
    if kind not in kinds:
        raise rope.error("rope_type", f"{kind!r} is not supported; supported are {', '.join(kinds)}")
    read = {
        "default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope,
        "dynamic": _dynamic, "proportional": _proportional,
    }[kind]  # fmt: skip
    kind = "default" if kind == "dynamic" else kind
    original = partial(_original_context, rope, fields, default_original_context or max_position_embeddings)
    scaling = read(rope, theta, max_position_embeddings, original)
    if not scaling.get("truncate", True) and layer_type is not None and fields.object("rope_parameters").names():
        raise rope.error("truncate", "is false: transformers does not read it in the entry of a layer type")
    rotary_dim = _rotary_dim(rope, fields, head_dim, default_partial_rotary_factor)
    if kind == "proportional":
        scaling["head_dim"] = head_dim
    config = RopeConfig(theta, rotary_dim, kind, interleaved=interleaved, **scaling)
    for name, factors in (("short_factor", config.short_factors), ("long_factor", config.long_factors)):
        if kind == "longrope" and len(factors) != rotary_dim // 2:
            raise rope.error(name, f"must be {rotary_dim // 2} numbers, one for each pair, not {len(factors)}")
    return config


def _kind(rope: Fields) -> str:
    kind, older = rope.string("rope_type", None), rope.string("type", None)
    if kind is not None and older is not None and kind != older:
        raise rope.error("rope_type", f"is {kind!r:.80}, but type says {older!r:.80}")
    return str(kind or older or "default")


def _inside_or_outside(rope: Fields, name: str, fields: Fields, outer_name: str, default: float) -> float:
    inside = rope.number(name, None, least=_LEAST, most=_MOST)
    outside = fields.number(outer_name, None, least=_LEAST, most=_MOST)
    if inside is not None and outside is not None and inside != outside:
        place = rope.where.removeprefix(f"{fields.where}: ")
        raise fields.error(outer_name, f"is {outside:g}, but {place} says {name} = {inside:g}")
    return float(inside or outside or default)


def _rotary_dim(rope: Fields, fields: Fields, head_dim: int, default_factor: float | None) -> int:
    name = "partial_rotary_factor"
    factor = _inside_or_outside(rope, name, fields, name, 1.0 if default_factor is None else default_factor)
    if default_factor is None and factor != 1.0:
        raise (rope if rope.has(name) else fields).error(name, f"= {factor:g} is not supported")
    rotary_dim = int(head_dim * factor)
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise rope.error(
            name, f"= {factor:g} of head_dim = {head_dim} must be an even number from 2 to {head_dim}, not {rotary_dim}"
        )
    return rotary_dim


def _default(rope: Fields, theta: float, positions: int, original: Callable[[], int]) -> dict[str, Any]:
    rope.expect("factor", 1, 1.0)
    rope.raw("original_max_position_embeddings")  # a note
    return {}


def _dynamic(rope: Fields, theta: float, positions: int, original: Callable[[], int]) -> dict[str, Any]:
    """The default: "dynamic" grows the base only beyond `max_position_embeddings`, which no sequence exceeds."""
    rope.number("factor", least=1.0, most=_MOST)
    rope.raw("original_max_position_embeddings")  # a note
    return {}


def _linear(rope: Fields, theta: float, positions: int, original: Callable[[], int]) -> dict[str, Any]:
    rope.raw("original_max_position_embeddings")  # a note
    return {"factor": rope.number("factor", least=1.0, most=_MOST)}


def _proportional(rope: Fields, theta: float, positions: int, original: Callable[[], int]) -> dict[str, Any]:
    return {"factor": rope.number("factor", 1.0, least=_LEAST, most=_MOST)}


def _llama3(rope: Fields, theta: float, positions: int, original: Callable[[], int]) -> dict[str, Any]:
    low, high = (rope.number(name, least=_LEAST, most=_MOST) for name in ("low_freq_factor", "high_freq_factor"))
    if high <= low:
        raise rope.error("high_freq_factor", f"{high:g} must be greater than low_freq_factor, {low:g}")
    return {
        "factor": rope.number("factor", least=1.0, most=_MOST),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original(),
    }


def _yarn(rope: Fields, theta: float, positions: int, original: Callable[[], int]) -> dict[str, Any]:
    factor = rope.number("factor", least=1.0, most=_MOST)
    fast = rope.number("beta_fast", 32.0, least=_LEAST, most=_MOST)
    slow = rope.number("beta_slow", 1.0, least=_LEAST, most=_MOST)
    if fast < slow:
        raise rope.error("beta_fast", f"{fast:g} must not be less than beta_slow, {slow:g}")
    if theta == 1.0:
        raise rope.error("rope_theta", "must not be 1 for rope_type 'yarn'")
    scale, scale_all = (rope.number(name, 0.0, least=0.0, most=_MOST) for name in ("mscale", "mscale_all_dim"))
    attention = rope.number("attention_factor", None, least=_LEAST, most=_MOST)
    if attention is None and scale and scale_all:
        attention = _attention_scale(factor, scale) / _attention_scale(factor, scale_all)
    elif attention is None:
        attention = _attention_scale(factor, 1.0)
    return {
        "factor": factor,
        "original_max_position_embeddings": original(),
        "beta_fast": fast,
        "beta_slow": slow,
        "attention_factor": attention,
        "truncate": rope.boolean("truncate", True),
    }


def _longrope(rope: Fields, theta: float, positions: int, original: Callable[[], int]) -> dict[str, Any]:
    context = original()
    factor = rope.number("factor", positions / context, least=_LEAST, most=_MOST)
    attention = rope.number("attention_factor", None, least=_LEAST, most=_MOST)
    if attention is None:
        if factor > 1.0 and context < 2:
            raise rope.error("original_max_position_embeddings", f"must be at least 2, not {context}")
        attention = math.sqrt(1.0 + math.log(factor) / math.log(context)) if factor > 1.0 else 1.0
    return {
        "factor": factor,
        "original_max_position_embeddings": context,
        "attention_factor": attention,
        "short_factors": rope.numbers("short_factor", least=_LEAST, most=_MOST),
        "long_factors": rope.numbers("long_factor", least=_LEAST, most=_MOST),
    }


def _original_context(rope: Fields, fields: Fields, default: int) -> int:
    name = "original_max_position_embeddings"
    inside, outside = rope.integer(name, None), fields.integer(name, None)
    if inside is not None and outside is not None and outside != inside:
        raise rope.error(name, f"is {inside}, but the config says {outside} outside")
    return int(inside or outside or default)


def _attention_scale(factor: float, scale: float) -> float:
    """The factor of cosine and sine that keeps attention over a longer context as sharp."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0
