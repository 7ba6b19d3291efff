"""Configs spoilt at random: a typed error, or a config whose numbers can be used. Nothing else ever comes out."""

from __future__ import annotations

import copy
import json
import math
import random
from typing import Any

import numpy as np
import pytest

from models.configuration.config import ModelConfig
from models.configuration.harmless_fields import HARMLESS, NEUTRAL
from models.configuration.rope_config import RopeConfig
from models.errors import ConfigError
from models.registry import parse_config
from models.rope import make_rope_table
from tests.models.folders import CASES, GOLDENS

SOURCES = [
    json.loads((GOLDENS / case / name).read_text()) for case in CASES for name in ("config.json", "config_older.json")
]
NAMES = sorted({name for source in SOURCES for name in source} | HARMLESS | set(NEUTRAL))
ROPES = [
    {"type": "su"},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 0.0},
    {"rope_type": "yarn", "factor": 1e300},
    {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 1.0000001},
    {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
    {"full_attention": {"rope_theta": 1e4}, "sliding_attention": None},
]
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 1 << 20, 10**9, 10**30, 10**400, 0.0, -0.0, 0.5, 1.0, 1e-45, 1e-300, 1e15,
    1e308, math.nan, math.inf, -math.inf, "", "silu", "gelu", "default", "float32", "llama", "auto", "\ud800", [], [1],
    [None], ["LlamaForCausalLM"], ["full_attention", "sliding_attention"], {}, {"a": 1}, *ROPES,
]  # fmt: skip


def spoil(values: dict[str, Any], random_: random.Random) -> dict[str, Any]:
    """One field more, less, or another, at the top or in an object below it."""
    holder = random_.choice([values, *(value for value in values.values() if isinstance(value, dict))])
    names = list(holder)
    kind = random_.random()
    if kind < 0.15 and names:
        del holder[random_.choice(names)]
    elif kind < 0.3:
        holder[random_.choice(NAMES)] = copy.deepcopy(random_.choice(VALUES))
    elif kind < 0.4:
        values[random_.choice(["rope_scaling", "rope_parameters"])] = copy.deepcopy(random_.choice(ROPES))
    elif kind < 0.5 and len(names) > 1:
        one, other = random_.sample(names, 2)
        holder[one], holder[other] = holder[other], holder[one]
    elif kind < 0.6 and names:
        holder[random_.choice(["type", "factor", "x", *NAMES])] = holder[random_.choice(names)]
    elif names:
        name = random_.choice(names)
        value = holder[name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        near = [value + 1, value - 1, value * 2, -value] if is_number else []
        holder[name] = copy.deepcopy(random_.choice([*near, *VALUES]))
    return values


def check(config: ModelConfig) -> None:
    assert config.num_heads % config.num_kv_heads == 0
    assert len(config.layer_windows) == len(config.attention_scales) == config.num_layers
    assert all(window is None or window >= 1 for window in config.layer_windows)
    assert all(math.isfinite(scale) and scale > 0 for scale in config.attention_scales)
    assert 0.0 <= config.norm_eps <= 1.0
    assert min(config.hidden_size, config.head_dim, config.intermediate_size, config.vocab_size) >= 1
    for rope in {getattr(config, "rope", None), *getattr(config, "layer_ropes", ())} - {None}:
        check_rope(rope)


def check_rope(rope: RopeConfig) -> None:
    table = make_rope_table(rope, 5)
    assert np.isfinite(table.cos.numpy()).all()
    assert np.isfinite(table.sin.numpy()).all()


@pytest.mark.parametrize("seed", range(2))
def test_a_spoilt_config_is_refused_or_makes_sense(seed: int) -> None:
    random_ = random.Random(seed)
    loaded = 0
    for _ in range(1000):
        values = copy.deepcopy(random_.choice(SOURCES))
        for _ in range(random_.choice([1, 1, 1, 2, 3])):
            spoil(values, random_)
        try:
            config = parse_config(values)
        except ConfigError as error:
            assert str(error).startswith("config.json: ")  # noqa: PT017 - one of thousands
        else:
            loaded += 1
            check(config)
    assert loaded > 100  # harmless changes load
