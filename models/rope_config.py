"""What a config says about rotary position embeddings, in both of its spellings.

Older files carry `rope_theta` and `rope_scaling: {"type" or "rope_type", "factor", ...}`; transformers 5
writes one object, `rope_parameters: {"rope_type", "rope_theta", "factor", ...}`. Both become the same
`RopeConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from models.json_fields import Fields

_DEFAULT_THETA = 10_000.0

# The fields that a kind may carry; `original_max_position_embeddings` is only a note unless it is llama3.
_FIELDS_OF_KIND = {
    "default": {"original_max_position_embeddings"},
    "linear": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}
_FIELDS_OF_ALL = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embeddings over the whole head, halves rotated against each other (Su et al. 2021).

    `kind` is "default", "linear" (positions divided by `factor`, Chen et al. 2023) or "llama3" (low
    frequencies divided by `factor`, high ones kept, those between interpolated; Llama 3.1). Factors that a
    kind does not use are 1; `original_max_position_embeddings`, in tokens, is 0 unless the kind is llama3.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0


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
    low, high = rope.number("low_freq_factor", above=0.0), rope.number("high_freq_factor", above=0.0)
    if high <= low:
        raise rope.error("high_freq_factor", f"{high:g} must be greater than low_freq_factor, {low:g}")
    original = rope.integer("original_max_position_embeddings", max_position_embeddings)
    outer = fields.integer("original_max_position_embeddings", original)
    if outer != original:
        raise rope.error(
            "original_max_position_embeddings", f"is {original}, but the config says {outer} outside"
        )
    return RopeConfig(theta, kind, factor, low, high, original)


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
