"""The preparation of a model's pictures, read from `preprocessor_config.json` or the `image_processor` of transformers
5's `processor_config.json`, which takes precedence. Both files are optional."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from msgspec.structs import replace

from models.checkpoints.model_files import open_model
from models.configuration.json_fields import Fields, read_json_object
from runtime.images.patches import TOKEN_COUNTS, FixedRule, PatchRule, Resample, Rule, SideRule, TokenRule
from tokenizer.warn import warn_once

PROCESSOR_FILE = "processor_config.json"

_LINE_END_TOKENS = {"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
"""Default names of the tokens that end a line, and the last line."""

_NOTES = (
    "auto_map", "data_format", "device", "disable_grouping", "image_processor_type", "input_data_format",
    "processor_class", "return_tensors", "do_pad", "pad_size", "default_to_square", "image_seq_length",
)  # fmt: skip
_STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")


def read_patch_rule(folder: str | Path, default: Rule, mmproj: str = "") -> Rule:
    """The rule of a model's folder or GGUF file, or `default`, from the model's config, if it has no such file.

    Raises `ConfigError` for a value that contradicts the config or is not supported.
    """
    processor = _fields_of(folder, PROCESSOR_FILE)
    if processor is not None and isinstance(default, SideRule):  # its processor gives the size of a token
        processor.expect("patch_size", default.patch_size)
        processor.expect("spatial_merge_size", default.merge_size)
    nested = processor is not None and processor.has("image_processor")
    fields = (
        processor.object("image_processor")
        if processor and nested
        else open_model(folder, mmproj=mmproj).preprocessor()
    )
    if fields is None:
        return default
    for name in _NOTES:
        fields.raw(name)
    for name in _STEPS:
        fields.expect(name, not (isinstance(default, TokenRule) and name == "do_normalize"))
    factor = fields.number("rescale_factor", 1 / 255)
    if abs(factor * 255 - 1) > 1e-9:
        raise fields.error("rescale_factor", f"= {factor} is not supported")
    if isinstance(default, FixedRule):
        rule: Rule = _read_fixed(fields, default)
    elif isinstance(default, SideRule):
        rule = _read_sides(fields, default)
    elif isinstance(default, TokenRule):
        rule = _read_tokens(fields, default)
    else:
        rule = _read_pixels(fields, default)
    if not isinstance(default, TokenRule):
        mean, std = (_channels(fields, f"image_{name}", getattr(default, name)) for name in ("mean", "std"))
        if min(std) <= 0:
            raise fields.error("image_std", f"{std} must be above 0")
        rule = replace(rule, mean=mean, std=std)
    fields.refuse_unread(lambda name, value: False)
    return rule


def _read_pixels(fields: Fields, default: PatchRule) -> PatchRule:
    """The rule of pictures that keep their shape within limits of pixels."""
    for name in ("crop_size", "do_center_crop"):
        fields.raw(name)
    for name, wanted in (
        ("patch_size", default.patch_size), ("merge_size", default.merge_size),
        ("temporal_patch_size", default.num_frames), ("resample", 3),
    ):  # fmt: skip
        fields.expect(name, wanted)
    size = fields.object("size")
    least = fields.integer("min_pixels", None) or size.integer("shortest_edge", default.min_pixels)
    most = fields.integer("max_pixels", None) or size.integer("longest_edge", default.max_pixels)
    if least > most:
        raise fields.error("min_pixels", f"= {least} is above max_pixels = {most}")
    return replace(default, min_pixels=least, max_pixels=most)


def read_line_ends(folder: str | Path, default: tuple[int, int]) -> tuple[int, int] | None:
    """The ids of the tokens that end a line of a picture's tokens, and its last line: by the names that the folder's
    processor has for them, or those of Pixtral's; `default` where the folder has no `tokenizer.json`. None, with a
    warning, if the tokenizer lacks these tokens: the model then takes no pictures.

    Raises `ConfigError`.
    """
    processor, tokenizer = _fields_of(folder, PROCESSOR_FILE), _fields_of(folder, "tokenizer.json")
    if tokenizer is None:
        return default
    added = tokenizer.raw("added_tokens") or []
    ids = {each.get("content"): each.get("id") for each in added if isinstance(each, dict)}
    found = []
    for field, usual in _LINE_END_TOKENS.items():
        name = usual if processor is None else processor.string(field, usual)
        if type(token := ids.get(name)) is not int:
            why = f"which ends lines of a picture's tokens ({field} of {PROCESSOR_FILE}): the model reads no pictures"
            warn_once(f"{tokenizer.where}: added_tokens has no {name!r:.80}, {why}")
            return None
        found.append(token)
    return found[0], found[1]


def _fields_of(folder: str | Path, name: str) -> Fields | None:
    path = Path(folder) / name
    return Fields(read_json_object(path), str(path)) if path.is_file() else None


def _read_sides(fields: Fields, default: SideRule) -> SideRule:
    """The rule of pictures whose sides have a limit each, or one together."""
    for name in ("crop_size", "patch_size"):  # the processor's own counts
        fields.raw(name)
    fields.expect("resample", 3)
    fields.expect("do_center_crop", False)
    sides = default.most_height, default.most_width
    if isinstance(fields.raw("size"), int):
        sides = (fields.integer("size", most=1 << 15),) * 2
    elif fields.has("size"):
        size = fields.object("size")
        names = ("longest_edge",) * 2 if size.has("longest_edge") else ("height", "width")
        sides = size.integer(names[0], most=1 << 15), size.integer(names[1], most=1 << 15)
    return replace(default, most_height=sides[0], most_width=sides[1])


def _read_tokens(fields: Fields, default: TokenRule) -> TokenRule:
    """The rule of pictures of so many tokens at most."""
    for name in ("size", "image_mean", "image_std"):  # pixels are scaled in the tower
        fields.raw(name)
    fields.expect("resample", 3)
    side = fields.integer("patch_size", 16) * fields.integer("pooling_kernel_size", 3)
    if side != default.factor:
        raise fields.error("patch_size", f"times pooling_kernel_size is {side}, and a token's side {default.factor}")
    count = fields.integer("max_soft_tokens", default.max_tokens)
    if count not in TOKEN_COUNTS:
        raise fields.error("max_soft_tokens", f"= {count} must be one of {', '.join(map(str, TOKEN_COUNTS))}")
    return replace(default, max_tokens=count)


def _read_fixed(fields: Fields, default: FixedRule) -> FixedRule:
    """The rule of a tower whose pictures have one size: the config's, which the file must lead to."""
    for name in ("min_crop_size", "max_num_crops", "min_ratio_to_activate"):
        fields.raw(f"pan_and_scan_{name}")
    fields.expect("do_pan_and_scan", False)
    wanted = (default.height, default.width)
    edge, crops = None, fields.boolean("do_center_crop", default.shortest_edge is not None)
    if fields.has("size") and isinstance(fields.raw("size"), dict):
        size = fields.object("size")
        if size.has("shortest_edge"):
            edge = size.integer("shortest_edge")
            size.refuse_unread(lambda name, value: False)
        elif (given := (size.integer("height"), size.integer("width"))) != wanted:
            raise fields.error("size", f"= {given[0]} x {given[1]} must be the tower's {wanted[0]} x {wanted[1]}")
    elif fields.has("size"):
        edge = fields.integer("size")
    else:
        edge = default.shortest_edge
    crop = fields.raw("crop_size")
    if crops and crop is not None:
        sides = (fields.integer("crop_size"),) * 2 if isinstance(crop, int) else tuple(
            fields.object("crop_size").integer(name) for name in ("height", "width")
        )  # fmt: skip
        if sides != wanted:
            raise fields.error("crop_size", f"= {sides[0]} x {sides[1]} must be the tower's {wanted[0]} x {wanted[1]}")
    if edge is not None and not crops:
        raise fields.error("do_center_crop", "is false, but size has a shortest_edge: pictures would differ in size")
    if edge is not None and edge < max(wanted):
        raise fields.error("size", f"shortest_edge = {edge} is below the tower's {max(wanted)}")
    filters = {2: "bilinear", 3: "bicubic"}
    number = fields.integer("resample", 2 if default.resample == "bilinear" else 3)
    if number not in filters:
        raise fields.error("resample", f"= {number} is not supported: 2 (bilinear) or 3 (bicubic)")
    return replace(default, shortest_edge=edge, resample=cast(Resample, filters[number]))


def _channels(fields: Fields, name: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
    values = fields.numbers(name) if fields.has(name) else default
    if len(values) != 3:
        raise fields.error(name, f"must be 3 numbers, not {len(values)}")
    return values[0], values[1], values[2]
