"""Rotary tables: closed forms of each kind, and precision far into the context."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from models.configuration.harmless_fields import is_harmless
from models.configuration.json_fields import Fields
from models.configuration.rope_config import RopeConfig, parse_rope
from models.errors import ConfigError
from models.rope import inverse_frequencies, make_rope_table
from tests.models.folders import GOLDENS

REFERENCES = json.loads((GOLDENS / "rope.json").read_text())


def test_default_frequencies_are_powers_of_theta() -> None:
    frequencies = inverse_frequencies(RopeConfig(10000.0, 8))
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, [1.0, 0.1, 0.01, 0.001], rtol=2e-7)


def test_linear_divides_positions() -> None:
    plain, scaled = (make_rope_table(RopeConfig(1e4, 16, kind, 4.0), 200) for kind in ("default", "linear"))
    np.testing.assert_array_equal(scaled.cos.numpy()[::4][:50], plain.cos.numpy()[:50])
    np.testing.assert_array_equal(scaled.sin.numpy()[::4][:50], plain.sin.numpy()[:50])


def test_llama3_keeps_short_waves_stretches_long_ones_and_blends_between() -> None:
    rope = RopeConfig(5e5, 128, "llama3", 8.0, 1.0, 4.0, 8192)
    plain = inverse_frequencies(RopeConfig(5e5, 128)).astype(np.float64)
    scaled = inverse_frequencies(rope).astype(np.float64)
    wavelengths = 2 * math.pi / plain
    is_short, is_long = wavelengths < 8192 / 4, wavelengths > 8192
    is_between = ~is_short & ~is_long
    assert is_short.any()
    assert is_long.any()
    assert is_between.any()
    np.testing.assert_array_equal(scaled[is_short], plain[is_short])
    np.testing.assert_allclose(scaled[is_long], plain[is_long] / 8, rtol=1e-7)
    blend = (8192 / wavelengths[is_between] - 1) / 3
    np.testing.assert_allclose(
        scaled[is_between], (1 - blend) * plain[is_between] / 8 + blend * plain[is_between], rtol=1e-6
    )


def longrope(kind: str, shard: float) -> RopeConfig:
    values = {
        "rope_scaling": {"type": kind, "short_factor": [1, 1, 2], "long_factor": [1, 4, 8.0]},
        "original_max_position_embeddings": 64,
        "partial_rotary_factor": shard,
    }
    return parse_rope(
        Fields(values, "x"),
        8,
        256,
        kinds=("longrope",),
        aliases={"su": "longrope"},
        default_partial_rotary_factor=1.0,
    )


def test_longrope_has_rows_of_their_own_for_sequences_beyond_the_original_context() -> None:
    rope = longrope("longrope", 0.75)
    plain = inverse_frequencies(RopeConfig(1e4, 6))
    short, long = inverse_frequencies(rope), inverse_frequencies(rope, is_long=True)
    np.testing.assert_allclose(short, plain / [1, 1, 2], rtol=1e-6)
    np.testing.assert_allclose(long, plain / [1, 4, 8], rtol=1e-6)
    assert rope.attention_factor == math.sqrt(1 + math.log(4) / math.log(64))
    assert [rope.switch(positions) for positions in (10, 64, 65, 256)] == [None, None, 64, 64]
    assert RopeConfig(1e4, 6, original_max_position_embeddings=64).switch(65) is None
    within, beyond = make_rope_table(rope, 64), make_rope_table(rope, 100)
    assert within.cos.numpy()[0].tolist() == [np.float32(rope.attention_factor)] * 3
    for ours, alone in ((beyond.cos, within.cos), (beyond.sin, within.sin)):
        assert ours.shape == (164, 3)
        np.testing.assert_array_equal(ours.numpy()[:64], alone.numpy())
    angles = np.arange(100, dtype=np.float32)[:, None] * long
    np.testing.assert_allclose(beyond.sin.numpy()[64:], np.sin(angles) * rope.attention_factor, rtol=0, atol=1e-5)
    assert longrope("su", 0.75) == rope
    with pytest.raises(ConfigError, match="short_factor must be 4 numbers, one for each pair, not 3"):
        longrope("su", 1.0)


LAYERS = ("full_attention", "sliding_attention")


def test_an_entry_for_each_layer_type() -> None:
    entries = {"full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}, "sliding_attention": {}}
    fields = Fields({"rope_parameters": entries}, "x")
    full, sliding = (parse_rope(fields, 8, 256, layer_type=kind) for kind in LAYERS)
    assert (full, sliding) == (RopeConfig(1e6, 8, "linear", 8.0), RopeConfig(1e4, 8))
    fields.refuse_unread(lambda name, value: False)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_parameters": {"full_attention": "gelu"}}, "rope_parameters: full_attention must be an object"),
        ({"rope_parameters": {"full_attention": [], "sliding_attention": {}}}, "full_attention must be an object"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters: rope_type = 'linear' is not"),
        ({"rope_parameters": {"full_attention": {}, "stretch": 2}}, "rope_parameters: stretch = 2 is not supported"),
        ({"rope_parameters": {"full_attention": {"type": "su", "rope_type": "default"}}}, "'default', but type says"),
        ({"rope_parameters": {"full_attention": {"stretch": 2}}}, "full_attention: stretch = 2 is not supported"),
        (
            {"rope_parameters": {"full_attention": {}}, "rope_scaling": {"type": "linear", "factor": 2}},
            "rope_scaling is given beside rope_parameters with an entry",
        ),
    ],
)
def test_what_is_no_entry_for_each_layer_type(values: dict[str, object], message: str) -> None:
    def parse_both() -> None:
        fields = Fields(values, "x")
        for kind in LAYERS:
            parse_rope(fields, 8, 256, layer_type=kind)
        fields.refuse_unread(is_harmless)

    with pytest.raises(ConfigError, match=message):
        parse_both()


def test_the_table_turns_each_pair_by_position_times_frequency() -> None:
    table = make_rope_table(RopeConfig(10000.0, 64), 4096)
    assert table.cos.shape == table.sin.shape == (4096, 32)
    assert not table.interleaved
    cos, sin = table.cos.numpy().astype(np.float64), table.sin.numpy().astype(np.float64)
    np.testing.assert_array_equal(cos[0], 1.0)
    np.testing.assert_array_equal(sin[0], 0.0)
    np.testing.assert_allclose(cos**2 + sin**2, 1.0, atol=2e-7)
    angles = np.arange(4096)[:, None] * 10000.0 ** (-np.arange(0, 64, 2) / 64)
    # An angle is rounded to float32 twice, at most 4096 * 2^-23 in all.
    np.testing.assert_allclose(cos, np.cos(angles), atol=4096 * 2.0**-23)
    np.testing.assert_allclose(sin, np.sin(angles), atol=4096 * 2.0**-23)


@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_transformers_agrees_far_into_the_context(name: str) -> None:
    """At position 131,071 one unit in the last place of a frequency would turn a head by 0.008 radians."""
    reference = REFERENCES[name]
    fields = Fields({"rope_parameters": reference["rope_parameters"]}, name)
    rope, positions = parse_rope(fields, reference["head_dim"], 1 << 17), reference["positions"]
    frequencies = np.array(reference["frequencies"], np.float32)
    ours = inverse_frequencies(rope)
    np.testing.assert_array_max_ulp(ours, frequencies, 1)  # its power function is not always rounded right
    assert (ours != frequencies).sum() <= 1
    table = make_rope_table(rope, positions[-1] + 1)
    np.testing.assert_allclose(table.cos.numpy()[positions], reference["cos"], rtol=0, atol=5e-6)
    np.testing.assert_allclose(table.sin.numpy()[positions], reference["sin"], rtol=0, atol=5e-6)


@pytest.mark.parametrize("position", [1, 1000, 131071])
def test_the_first_pair_turns_by_exactly_its_position(position: int) -> None:
    table = make_rope_table(RopeConfig(5e5, 4), position + 1)
    assert table.cos.numpy()[position, 0] == np.float32(math.cos(position))
    assert table.sin.numpy()[position, 0] == np.float32(math.sin(position))
