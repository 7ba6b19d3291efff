"""How a model's pictures are prepared, as `preprocessor_config.json` says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from models.json_fields import Fields, read_json_object
from runtime.images.patches import PatchRule

FILE = "preprocessor_config.json"

_NOTES = (
    "auto_map", "crop_size", "data_format", "device", "disable_grouping", "image_processor_type", "input_data_format",
    "processor_class", "return_tensors", "do_pad", "pad_size", "do_center_crop", "default_to_square",
    "image_seq_length",
)  # fmt: skip


def read_patch_rule(folder: str | Path, default: PatchRule) -> PatchRule:
    """The rule of a model's folder; `default`, which the model's config gives, where the folder has no such file.

    Raises `ConfigError` for what contradicts the config, and for what is not supported.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        return default
    fields = Fields(read_json_object(path), str(path))
    for name in _NOTES:
        fields.raw(name)
    for name, wanted in (
        ("patch_size", default.patch_size), ("merge_size", default.merge_size),
        ("temporal_patch_size", default.num_frames), ("do_resize", True), ("do_rescale", True),
        ("do_normalize", True), ("do_convert_rgb", True), ("resample", 3),
    ):  # fmt: skip
        fields.expect(name, wanted)
    factor = fields.number("rescale_factor", 1 / 255)
    if abs(factor * 255 - 1) > 1e-9:
        raise fields.error("rescale_factor", f"= {factor} is not supported")
    size = fields.object("size")
    least = fields.integer("min_pixels", None) or size.integer("shortest_edge", default.min_pixels)
    most = fields.integer("max_pixels", None) or size.integer("longest_edge", default.max_pixels)
    if least > most:
        raise fields.error("min_pixels", f"= {least} is above max_pixels = {most}")
    rule = replace(
        default, min_pixels=least, max_pixels=most, mean=_channels(fields, "image_mean", default.mean),
        std=_channels(fields, "image_std", default.std),
    )  # fmt: skip
    if min(rule.std) <= 0:
        raise fields.error("image_std", f"{rule.std} must be above 0")
    fields.refuse_unread(lambda name, value: False)
    return rule


def _channels(fields: Fields, name: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
    values = fields.numbers(name) if fields.has(name) else default
    if len(values) != 3:
        raise fields.error(name, f"must be 3 numbers, not {len(values)}")
    return values[0], values[1], values[2]
