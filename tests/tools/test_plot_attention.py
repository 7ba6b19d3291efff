"""The drawn attention weights: those of the model, causal, and what the picture shows of them."""

from __future__ import annotations

import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from runtime.errors import InvalidArgumentError
from runtime.llm import LLM
from tests.oracles.attention import attention_weights as oracle_weights
from tools import plot_attention

DEMO = Path(plot_attention.__file__).parents[1] / "models" / "demo"
IDS = list(range(3, 24))


@pytest.mark.emulator
@pytest.mark.exhaustive
def test_the_demo_models_weights_are_causal_and_sum_to_one() -> None:
    weights = plot_attention.attention_weights(str(DEMO), IDS)
    assert weights.shape == (4, 8, 21, 21)
    assert (weights[:, :, ~np.tri(21, dtype=bool)] == 0).all()
    assert (weights[:, :, np.tri(21, dtype=bool)] > 0).all()
    np.testing.assert_allclose(weights.sum(-1), 1, atol=2e-6)
    assert weights.std(axis=(2, 3)).min() > 0.01  # not all alike


@pytest.mark.emulator
def test_the_weights_are_those_of_the_queries_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first layer, on the cpu, by the oracle."""
    from runtime.backends import cpu

    seen = []
    original = cpu.attention

    def observe(q, k_cache, v_cache, batch, group, pages, scale, window, sinks, softcap, *others):
        assert softcap is None
        assert sinks is None
        if not seen:
            keys = [k_cache.array[slot // 16, :, :, slot % 16] for slot in range(len(IDS))]  # [Hkv, D] each
            seen.append(oracle_weights(q.array.copy(), np.stack(keys), scale, window))
        return original(q, k_cache, v_cache, batch, group, pages, scale, window, sinks, softcap, *others)

    monkeypatch.setattr(cpu, "attention", observe)
    with LLM(device="cpu", dtype="float32", max_model_len=64, kv_cache_bytes=1 << 22) as llm:
        llm.logits(IDS)
    monkeypatch.undo()
    first = plot_attention.attention_weights(str(DEMO), IDS)[0]
    expected = np.asarray(seen[0])
    assert expected.shape == (21, 8, 21)
    np.testing.assert_allclose(first, expected.transpose(1, 0, 2), atol=1e-5)


def test_a_prompt_has_a_size() -> None:
    for ids in ([], [1] * (plot_attention.MOST_TOKENS + 1)):
        with pytest.raises(InvalidArgumentError, match="must be 1 to 256"):
            plot_attention.attention_weights(str(DEMO), ids)


def decoded(png: bytes) -> np.ndarray:
    """The pixels of a PNG of ours; its checksums are checked."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    position, parts = 8, {}
    while position < len(png):
        (length,), kind = struct.unpack_from(">I", png, position), png[position + 4 : position + 8]
        parts[kind] = png[position + 8 : position + 8 + length]
        (checksum,) = struct.unpack_from(">I", png, position + 8 + length)
        assert checksum == zlib.crc32(kind + parts[kind])
        position += 12 + length
    width, height = struct.unpack_from(">II", parts[b"IHDR"])
    rows = np.frombuffer(zlib.decompress(parts[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)
    assert (rows[:, 0] == 0).all()
    return rows[:, 1:].reshape(height, width, 3)


def test_pixels() -> None:
    weights = np.array([[1, 0], [0.25, 0.75]], np.float32)
    pixels = decoded(plot_attention.png(plot_attention.pixels_of(weights, 3)))
    assert pixels.shape == (6, 6, 3)
    assert (pixels[:3, :3] == plot_attention.DARK).all()
    assert (pixels[:3, 3:] == 255).all()
    assert (pixels[3:, :3] == np.rint((255 + plot_attention.DARK) / 2)).all()


@pytest.mark.exhaustive
def test_a_grid_has_a_map_for_each_layer_and_head() -> None:
    weights = np.tril(np.ones((2, 3, 4, 4), np.float32)) / np.arange(1, 5, dtype=np.float32)[:, None]
    pixels = decoded(plot_attention.png_grid(weights))
    side = 24 * 4
    assert pixels.shape == (2 * (side + 6) + 6, 3 * (side + 6) + 6, 3)
    assert (pixels[6:30, 6:30] == plot_attention.DARK).all()
    text = plot_attention.svg_grid(weights, range(2), range(3), ["a", "b", "c", "d"])
    assert len(re.findall("<image ", text)) == 6
    assert "layer 1<" in text
    assert "head 2<" in text
    single = plot_attention.svg_grid(weights[1:, 2:], range(1, 2), range(2, 3), ["a", "<b>", "c", "d"])
    assert "layer 1, head 2" in single
    assert single.count("&lt;b&gt;") == 2


@pytest.mark.parametrize(("arguments", "words"), [(["--out", "a.jpg"], "must end in"), (["--device", "cpu"], "no GPU")])
def test_refusals(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        plot_attention.main([str(DEMO), "Hello", *arguments])
    assert words in capsys.readouterr().err
