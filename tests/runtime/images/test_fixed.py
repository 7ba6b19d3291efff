"""Pictures of one size against transformers' processors of CLIP, SigLIP and Gemma 3: the resized bytes of 126 sizes
and of files in all modes. Made by `tools/references/make_image_goldens.py`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs Pillow (extra vision)")

from models.configuration.preprocessing import read_patch_rule
from models.errors import ConfigError
from runtime.images.decoding import ImageError, decode
from runtime.images.patches import FixedRule, Patches, Rule, make_patches, normalised
from tests.runtime.images.pictures import FIXED, PICTURES, SMALL_SIZES, picture_bytes, small_picture

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden_fixed.json").read_text())
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
TOWERS = {
    "CLIP": FixedRule(height=28, width=28, patch_size=7, num_tokens=16, shortest_edge=28, mean=CLIP_MEAN, std=CLIP_STD),
    "Siglip": FixedRule(height=28, width=28, patch_size=7, num_tokens=16),
    "Gemma3": FixedRule(height=28, width=28, patch_size=7, num_tokens=4, resample="bilinear"),
}
"""What a tower's config says; a file says the rest."""


def rule_of(folder: Path, name: str, **changes: Any) -> FixedRule:
    given = {key: value for key, value in {**FIXED[name], **changes}.items() if key != "processor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(given))
    rule = read_patch_rule(folder, TOWERS[FIXED[name]["processor"]])
    assert isinstance(rule, FixedRule)
    return rule


def picture_of(patches: Patches, size: int = 7) -> np.ndarray[Any, Any]:
    """Patches put together again, `[3, height, width]`."""
    cut = patches.pixels.reshape(patches.rows, patches.columns, 3, size, size)
    return cut.transpose(2, 0, 3, 1, 4).reshape(3, patches.rows * size, patches.columns * size)


def digest(patches: Patches) -> str:
    return hashlib.sha256(picture_of(patches).tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("name", FIXED)
def test_pixels_are_transformers(tmp_path: Path, name: str) -> None:
    rule, golden = rule_of(tmp_path, name), GOLDEN[name]
    assert len(golden["sizes"]) == len(SMALL_SIZES)
    assert [digest(make_patches(small_picture(*size), rule)) for size in SMALL_SIZES] == golden["sizes"]
    files = {each: digest(make_patches(decode(picture_bytes(each)), rule)) for each in PICTURES}
    assert files == golden["files"]
    made = make_patches(decode(picture_bytes("rgb")), rule)
    floats = normalised(made.pixels, rule).reshape(4, 4, 3, 7, 7).transpose(2, 0, 3, 1, 4).ravel()
    np.testing.assert_allclose(floats[:: max(1, floats.size // 7)][:7], golden["normalised"], atol=1e-6)


def test_what_is_left_of_a_patch_is_dropped() -> None:
    rule = FixedRule(height=29, width=34, patch_size=7, num_tokens=16)
    made = make_patches(np.asarray(small_picture(29, 34)), rule)
    assert made.grid == rule.grid == (4, 4)
    whole = np.asarray(small_picture(29, 34))[:28, :28].transpose(2, 0, 1)
    assert np.array_equal(picture_of(made), whole)


def test_a_fixed_grid() -> None:
    rule = TOWERS["Gemma3"]
    assert rule.token_grid(4, 4) == (1, 4)
    with pytest.raises(ImageError, match="4 x 5 patches, must be 4 x 4"):
        rule.token_grid(4, 5)
    with pytest.raises(ImageError, match="sides differ by more than 200 times"):
        make_patches(np.zeros((1, 201, 3), np.uint8), TOWERS["CLIP"])


def test_rules_cross_a_socket() -> None:
    for rule in TOWERS.values():
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(rule), type=Rule) == rule


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("clip", {"crop_size": {"height": 21, "width": 28}}, "crop_size = 21 x 28 must be the tower's 28 x 28"),
        ("clip", {"size": {"shortest_edge": 20}}, "shortest_edge = 20 is below the tower's 28"),
        ("clip", {"do_center_crop": False}, "do_center_crop is false"),
        ("siglip", {"size": {"height": 28, "width": 35}}, "size = 28 x 35 must be the tower's 28 x 28"),
        ("siglip", {"resample": 1}, "resample = 1 is not supported"),
        ("siglip", {"image_std": [0.5, 0.5, 0]}, "must be above 0"),
        ("gemma3", {"do_pan_and_scan": True}, "do_pan_and_scan = True is not supported"),
        ("gemma3", {"do_rescale": False}, "do_rescale = False is not supported"),
        ("gemma3", {"tile": 3}, "tile"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rule_of(tmp_path, name, **changes)
