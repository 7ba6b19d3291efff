"""What a config says about rotary position embeddings, in both of its spellings.

Older files carry `rope_theta` and `rope_scaling: {"type" or "rope_type", "factor", ...}`; transformers 5
writes one object, `rope_parameters: {"rope_type", "rope_theta", "factor", ...}`. Both become the same
`RopeConfig`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from models.json_fields import Fields

_DEFAULT_THETA = 10_000.0

# The fields that a kind may carry; `original_max_position_embeddings` is only a note for default and linear.
_FIELDS_OF_KIND = {
    "default": {"original_max_position_embeddings"},
    "linear": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate",
    },
}  # fmt: skip
_FIELDS_OF_ALL = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embeddings over the whole head, halves rotated against each other (Su et al. 2021).

    `kind` is "default", "linear" (positions divided by `factor`, Chen et al. 2023), "llama3" (low
    frequencies divided by `factor`, high ones kept, those between interpolated; Llama 3.1) or "yarn" (the
    same by rotations: pairs that turn more than `beta_fast` times over the original context stay, those that
    turn less than `beta_slow` times are stretched; cosine and sine are multiplied by `attention_factor`; Peng
    et al. 2023). Factors that a kind does not use are 1; `original_max_position_embeddings`, in tokens, is 0
    unless the kind is llama3 or yarn.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


def parse_rope(fields: Fields, max_position_embeddings: int) -> RopeConfig:
    """The rope fields of a `config.json`.

    Raises `ConfigError` for a kind or a field that is not supported, and where the two spellings contradict
    each other.
    """
    spelling, values = _one_spelling(fields)
    rope = Fields(values, f"{fields.where}: {spelling}")
    theta = rope.number("rope_theta", None, above=0.0)
    outer_theta = fields.number("rope_theta", None, above=0.0)
    if theta is not None and outer_theta is not None and theta != outer_theta:
        raise fields.error("rope_theta", f"is {outer_theta:g}, but {spelling} says {theta:g}")
    theta = theta or outer_theta or _DEFAULT_THETA

    kind = rope.string("rope_type", rope.string("type", "default"))
    if kind not in _FIELDS_OF_KIND:
        raise rope.error(
            "rope_type", f"{kind!r} is not supported; supported are {', '.join(_FIELDS_OF_KIND)}"
        )
    unknown = sorted(k for k in values if rope.has(k) and k not in _FIELDS_OF_KIND[kind] | _FIELDS_OF_ALL)
    if kind == "default" and rope.number("factor", 1.0) == 1.0:
        unknown = [name for name in unknown if name != "factor"]
    if unknown:
        raise rope.error(unknown[0], f"is not supported for rope_type {kind!r}")
    for holder in (fields, rope):
        if holder.number("partial_rotary_factor", 1.0) != 1.0:
            raise holder.error("partial_rotary_factor", "other than 1 is not supported")

    if kind == "default":
        return RopeConfig(theta)
    factor = rope.number("factor", least=1.0)
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    original = rope.integer("original_max_position_embeddings", max_position_embeddings)
    outer = fields.integer("original_max_position_embeddings", original)
    if outer != original:
        raise rope.error(
            "original_max_position_embeddings", f"is {original}, but the config says {outer} outside"
        )
    if kind == "yarn":
        return _yarn(rope, theta, factor, original)
    low, high = rope.number("low_freq_factor", above=0.0), rope.number("high_freq_factor", above=0.0)
    if high <= low:
        raise rope.error("high_freq_factor", f"{high:g} must be greater than low_freq_factor, {low:g}")
    return RopeConfig(theta, kind, factor, low, high, original)


def _yarn(rope: Fields, theta: float, factor: float, original: int) -> RopeConfig:
    fast = rope.number("beta_fast", 32.0, above=0.0)
    slow = rope.number("beta_slow", 1.0, above=0.0)
    if fast < slow:
        raise rope.error("beta_fast", f"{fast:g} must not be less than beta_slow, {slow:g}")
    attention = rope.number("attention_factor", None, above=0.0)
    if attention is None:
        scale, scale_all = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
        if scale and scale_all:
            attention = _attention_scale(factor, scale) / _attention_scale(factor, scale_all)
        else:
            attention = _attention_scale(factor, 1.0)
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original_max_position_embeddings=original,
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=attention,
        truncate=rope.boolean("truncate", True),
    )


def _attention_scale(factor: float, scale: float) -> float:
    """How much larger cosine and sine are, that attention over a longer context stays as sharp."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _one_spelling(fields: Fields) -> tuple[str, dict[str, Any]]:
    new, old = fields.object("rope_parameters"), fields.object("rope_scaling")
    for name, values in (("rope_parameters", new), ("rope_scaling", old)):
        if any(isinstance(value, dict) for value in values.values()):
            raise fields.error(name, "with a separate entry for each layer type is not supported")
    if new and old:
        # A writer may give both; a field that both hold must not differ.
        for key in new.keys() & old.keys():
            if new[key] != old[key]:
                said = f"{key} = {old[key]!r}, but rope_parameters says {new[key]!r}"
                raise fields.error("rope_scaling", said)
        return "rope_parameters", {**old, **new}
    return ("rope_scaling", old) if old else ("rope_parameters", new)
