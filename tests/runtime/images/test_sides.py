"""Pictures whose sides or tokens have limits against transformers' processors of Pixtral and Gemma 4: sizes, and the
resized bytes of 126 sizes and of files in all modes. Made by `tools/references/make_image_goldens.py`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs Pillow (extra vision)")

from models.configuration.preprocessing import read_line_ends, read_patch_rule
from models.errors import ConfigError
from runtime.images.decoding import ImageError, decode
from runtime.images.patches import FixedRule, Patches, PatchRule, Rule, SideRule, TokenRule, make_patches, normalised
from tests.runtime.images.pictures import PICTURES, SIDES, SIZES, SMALL_SIZES, TOKENS, picture_bytes, small_picture

GOLDEN: dict[str, Any] = {
    case: golden
    for kind in ("sides", "tokens")
    for case, golden in json.loads(Path(__file__).with_name(f"golden_{kind}.json").read_text(encoding="utf-8")).items()
}
PATCHES = {"large": (7, 2), "small": (4, 2), "oblong": (7, 1), "square": (4, 3)}
"""Pixels of a patch's side, patches of a token's, of Pixtral's."""


def rule_of(folder: Path, name: str, **changes: Any) -> SideRule | TokenRule:
    file = {key: value for key, value in {**SIDES, **TOKENS}[name].items() if key != "processor"}
    own = {"do_normalize": False} if name in TOKENS else {}
    (folder / "preprocessor_config.json").write_text(json.dumps({**file, **own, **changes}))
    if name in TOKENS:
        sizes = {"patch_size": file["patch_size"], "merge_size": file["pooling_kernel_size"]}
        default: Rule = TokenRule(max_tokens=280, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), **sizes)
    else:
        patch, merge = PATCHES[name]
        default = SideRule(most_height=1540, most_width=1540, patch_size=patch, merge_size=merge)
    rule = read_patch_rule(folder, default)
    assert isinstance(rule, SideRule | TokenRule)
    return rule


def made(image: Any, rule: SideRule | TokenRule) -> list[Any] | None:
    """A picture's height and width, and the digest of its pixels, put together again."""
    try:
        patches = make_patches(image, rule)
    except ImageError:
        return None
    pixels = picture_of(patches, rule)
    return [*pixels.shape[1:], hashlib.sha256(pixels.tobytes()).hexdigest()[:16]]


def picture_of(
    patches: Patches, rule: SideRule | TokenRule, values: np.ndarray[Any, Any] | None = None
) -> np.ndarray[Any, Any]:
    """`[3, height, width]` of patches that stand token by token."""
    merge, size = rule.merge_size, rule.patch_size
    lines, across = patches.rows // merge, patches.columns // merge
    cut = (patches.pixels if values is None else values).reshape(lines, across, merge, merge, 3, size, size)
    return np.ascontiguousarray(cut.transpose(4, 0, 2, 5, 1, 3, 6)).reshape(3, patches.rows * size, -1)


@pytest.mark.parametrize("name", [*SIDES, *TOKENS])
def test_pixels_are_transformers(tmp_path: Path, name: str) -> None:
    rule, golden = rule_of(tmp_path, name), GOLDEN[name]
    assert len(golden["sizes"]) == len(SMALL_SIZES)
    assert [made(small_picture(*size), rule) for size in SMALL_SIZES] == golden["sizes"]
    assert {each: made(decode(picture_bytes(each)), rule) for each in PICTURES} == golden["files"]
    patches = make_patches(decode(picture_bytes("rgb")), rule)
    floats = picture_of(patches, rule, normalised(patches.pixels, rule)).ravel()
    np.testing.assert_allclose(floats[:: max(1, floats.size // 7)][:7], golden["normalised"], atol=1e-6)


@pytest.mark.exhaustive
def test_a_thousand_sizes_of_gemma_4() -> None:
    golden = json.loads(Path(__file__).with_name("golden_gemma4.json").read_text(encoding="utf-8"))
    rule = TokenRule(max_tokens=280, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), patch_size=16, merge_size=3)
    assert len(golden) == len(SIZES) == 1000
    assert [made(small_picture(*size), rule) for size in SIZES] == golden


def test_a_grid_has_a_token_more_for_each_line() -> None:
    rule = SideRule(most_height=1540, most_width=1540, patch_size=14, merge_size=2)
    assert rule.resized(1080, 1920) == (868, 1540)
    assert rule.token_grid(62, 110) == (31, 56)
    assert rule.most_pixels == 1540**2
    assert rule.at_most(512).resized(1080, 1920) == (308, 532)
    with pytest.raises(ImageError, match="3 x 4 patches are no multiples of 2"):
        rule.token_grid(3, 4)
    with pytest.raises(ImageError, match="nothing is left of its shorter side"):
        rule.at_most(100).resized(2, 300)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(rule), type=Rule) == rule


@pytest.mark.parametrize("rule", [
    PatchRule(min_pixels=3136, max_pixels=12_845_056),
    FixedRule(height=336, width=336, patch_size=14, num_tokens=576, shortest_edge=336),
    SideRule(most_height=1540, most_width=1540, patch_size=14, merge_size=2),
])  # fmt: skip
def test_what_transformers_5_writes_into_processor_config(tmp_path: Path, rule: Rule) -> None:
    """It counts before a `preprocessor_config.json`; a file of films is no matter."""
    image = {"image_mean": [0.25, 0.5, 0.75], "do_pad": True, "image_processor_type": "Any", "rescale_factor": 1 / 255}
    processor = {"image_processor": image, "patch_size": 14, "spatial_merge_size": 2, "processor_class": "Any"}
    (tmp_path / "video_preprocessor_config.json").write_text('{"fps": 2, "image_mean": [0, 0, 0]}')
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.5, 0.5]}')
    assert read_patch_rule(tmp_path, rule).mean == (0.5, 0.5, 0.5)
    (tmp_path / "processor_config.json").write_text('{"processor_class": "Any"}')  # of transformers 4
    assert read_patch_rule(tmp_path, rule).mean == (0.5, 0.5, 0.5)
    (tmp_path / "processor_config.json").write_text(json.dumps(processor))
    read = read_patch_rule(tmp_path, rule)
    assert read == msgspec.structs.replace(rule, mean=(0.25, 0.5, 0.75))


def test_tokens_that_end_lines_are_found_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_line_ends(tmp_path, (12, 13)) == (12, 13)
    added = [{"content": "[IMG_BREAK]", "id": 30}, {"content": "[IMG_END]", "id": 29}, {"content": "<nl>", "id": 7}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    assert read_line_ends(tmp_path, (12, 13)) == (30, 29)
    (tmp_path / "processor_config.json").write_text('{"image_break_token": "<nl>"}')
    assert read_line_ends(tmp_path, (12, 13)) == (7, 29)
    (tmp_path / "processor_config.json").write_text('{"image_break_token": "<br>"}')
    assert read_line_ends(tmp_path, (12, 13)) is None
    assert "added_tokens has no '<br>', which ends lines of a picture's tokens (image_break_token of" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"do_center_crop": True}, "do_center_crop = True is not supported"),
        ({"resample": 2}, "resample = 2 is not supported"),
        ({"size": {"longest_edge": 0}}, "longest_edge must be from 1 to 32768, not 0"),
        ({"size": {"width": 4}}, "height is missing"),
        ({"size": {"longest_edge": 60, "tile": 3}}, "tile"),
        ({"max_soft_tokens": 100}, "max_soft_tokens = 100 must be one of 70, 140, 280, 560, 1120"),
        ({"pooling_kernel_size": 2}, "patch_size times pooling_kernel_size is 8, and a token's side 12"),
        ({"do_normalize": True}, "do_normalize = True is not supported"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    name = "large"
    if changes.keys() & {"max_soft_tokens", "pooling_kernel_size", "do_normalize"}:
        name = "squares"
    with pytest.raises(ConfigError, match=message):
        rule_of(tmp_path, name, **changes)


def test_a_processor_whose_tokens_are_of_another_size(tmp_path: Path) -> None:
    (tmp_path / "processor_config.json").write_text('{"patch_size": 16, "spatial_merge_size": 2}')
    with pytest.raises(ConfigError, match="patch_size = 16 is not supported"):
        rule_of(tmp_path, "large")
