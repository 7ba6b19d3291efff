"""Pictures that the demo model with a tower is trained on: shapes, a number, or a bar chart, drawn from a seed.

Everything but the facts is random: sizes, places, hues, line widths, background, noise. A drawing also has the places
of its objects (`Mark`), a training target that the model does not see.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

Array = np.ndarray[Any, Any]
Point = tuple[float, float]

SHAPES = ("circle", "square", "triangle", "star")
COLOURS = {
    "red": (215, 35, 40), "yellow": (240, 215, 30), "green": (40, 155, 60), "blue": (35, 80, 210),
    "purple": (130, 45, 160), "black": (25, 25, 25),
}  # fmt: skip
MOST_SHAPES, MOST_BARS = 3, 3
NUM_MARKS = 1 + len(SHAPES) * len(COLOURS) + 10 + 3 * len(COLOURS)
"""Kinds of marks: 0 for nothing, then shapes by colour, digits, bars by colour, the largest and the smallest bars."""


@dataclass(frozen=True, slots=True)
class Mark:
    """An object at a place: `x` and `y` in 0 … 1, `kind` below `NUM_MARKS`."""

    x: float
    y: float
    kind: int


@dataclass(frozen=True, slots=True)
class Drawing:
    """`facts`: ("shapes", ((shape, colour), ...)), ("number", "4"), or ("bars", ((colour, height), ...)), in percent
    of the largest, from left to right."""

    image: Image.Image
    facts: tuple[str, Any]
    marks: tuple[Mark, ...]


def sample(rng: random.Random, facts: tuple[str, Any], width: int, height: int) -> Drawing:
    """A drawing of `facts` of at least `width` x `height` pixels."""
    scale = rng.choice((1.0, 1.0, 1.5, 2.0, 3.0))
    size = round(width * scale), round(height * scale)
    canvas = Image.new("RGB", size, _background(rng))
    return _finished(rng, canvas, facts, _MARKS_OF[facts[0]](rng, canvas, facts[1]))


def draw_sheet(rng: random.Random, width: int, height: int) -> Drawing:
    """A sheet of as many shapes, or digits, as fit: dense training data, without questions."""
    canvas = Image.new("RGB", (2 * width, 2 * height), _background(rng))
    if rng.random() < 0.3:
        shapes = tuple((rng.choice(SHAPES), rng.choice(list(COLOURS))) for _ in range(rng.randint(3, 6)))
        return _finished(rng, canvas, ("sheet", shapes), _draw_shapes(rng, canvas, shapes))
    lines, across = rng.choice(((1, 1), (1, 2), (1, 2), (2, 2), (2, 2), (2, 3)))
    tall, wide = canvas.height / lines, canvas.width / across
    marks = []
    ink = _ink(rng)
    for index in range(lines * across):
        image = _digit(rng, digit := rng.choice("0123456789"), rng.uniform(0.55, 0.9) * min(tall, 1.3 * wide))
        left = index % across * wide + rng.uniform(0, 1) * max(0.0, wide - image.width)
        top = index // across * tall + rng.uniform(0, 1) * max(0.0, tall - image.height)
        canvas.paste(ink, (round(left), round(top)), image)
        marks.append((left + image.width / 2, top + image.height / 2, _DIGITS + int(digit)))
    return _finished(rng, canvas, ("sheet", None), marks)


_DIGITS = 1 + len(SHAPES) * len(COLOURS)
"""The mark of a nought."""


def _ink(rng: random.Random) -> tuple[int, int, int]:
    return _hue(rng, rng.choice(("black", "black", "blue", "red", "green", "purple")))


def _finished(
    rng: random.Random, canvas: Image.Image, facts: tuple[str, Any], marks: list[tuple[float, float, int]]
) -> Drawing:
    """Perhaps blurred, perhaps with noise."""
    size = canvas.size
    if rng.random() < 0.2:
        canvas = canvas.filter(ImageFilter.GaussianBlur(0.0025 * (size[0] + size[1])))
    elif rng.random() < 0.4:
        noise = np.random.default_rng(rng.getrandbits(32)).normal(0, rng.uniform(2, 8), (size[1], size[0], 1))
        canvas = Image.fromarray(np.clip(np.asarray(canvas, np.float32) + noise, 0, 255).astype(np.uint8))
    return Drawing(canvas, facts, tuple(Mark(x / size[0], y / size[1], kind) for x, y, kind in marks))


def sample_facts(rng: random.Random) -> tuple[str, Any]:
    """The facts of a drawing."""
    kind = rng.choices(("shapes", "number", "bars"), (0.6, 0.2, 0.2))[0]
    if kind == "number":
        return kind, str(rng.randrange(10))
    if kind == "bars":
        colours = rng.sample(list(COLOURS), rng.randint(2, MOST_BARS))
        return kind, tuple(zip(colours, _bar_heights(rng, len(colours)), strict=True))
    shapes = rng.sample(SHAPES, rng.randint(1, 3))
    colours = rng.sample(list(COLOURS), rng.randint(1, 4))
    return kind, tuple((rng.choice(shapes), rng.choice(colours)) for _ in range(rng.randint(1, MOST_SHAPES)))


def _bar_heights(rng: random.Random, count: int) -> tuple[int, ...]:
    """Heights in percent; the largest and the smallest differ from the others by 15."""
    while True:
        heights = [rng.randint(12, 100) for _ in range(count)]
        in_order = sorted(heights)
        if in_order[-1] - in_order[-2] >= 15 and in_order[1] - in_order[0] >= 15:
            return tuple(round(100 * height / in_order[-1]) for height in heights)


def _background(rng: random.Random) -> tuple[int, int, int]:
    light = rng.randint(225, 255)
    red, green, blue = (min(255, light + rng.randint(-10, 10)) for _ in range(3))
    return red, green, blue


def _hue(rng: random.Random, colour: str) -> tuple[int, int, int]:
    red, green, blue = (min(255, max(0, each + rng.randint(-15, 15))) for each in COLOURS[colour])
    return red, green, blue


def _draw_shapes(
    rng: random.Random, canvas: Image.Image, shapes: tuple[tuple[str, str], ...]
) -> list[tuple[float, float, int]]:
    pen = ImageDraw.Draw(canvas)
    width, height = canvas.size
    most = 0.17 * math.sqrt(width * height)
    radii: list[float] = []
    places: list[Point] = []
    while len(places) < len(shapes):
        radius = rng.uniform(0.65, 1.0) * most
        for _ in range(50):
            x, y = rng.uniform(radius, width - radius), rng.uniform(radius, height - radius)
            if all(math.dist((x, y), (px, py)) > 1.1 * (radius + pr) for (px, py), pr in zip(places, radii)):
                places.append((x, y))
                radii.append(radius)
                break
        else:
            most *= 0.93
            places.clear()
            radii.clear()
    marks = []
    for (shape, colour), (x, y), radius in zip(shapes, places, radii, strict=True):
        fill = _hue(rng, colour)
        outline = (40, 40, 40) if rng.random() < 0.15 else None
        turn = rng.uniform(-0.2, 0.2)
        if shape == "circle":
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill, outline=outline)
        else:
            pen.polygon(_corners(shape, x, y, radius, turn), fill=fill, outline=outline)
        marks.append((x, y, 1 + SHAPES.index(shape) * len(COLOURS) + list(COLOURS).index(colour)))
    return marks


def _corners(shape: str, x: float, y: float, radius: float, turn: float) -> list[Point]:
    if shape == "star":
        spokes = [(math.pi * i / 5, 1.0 if i % 2 == 0 else 0.42) for i in range(10)]
    elif shape == "square":
        spokes = [(math.pi * (i + 0.5) / 2, 1.0) for i in range(4)]
    else:
        spokes = [(math.tau * i / 3, 1.0) for i in range(3)]
    return [
        (x + radius * far * math.sin(angle + turn), y - radius * far * math.cos(angle + turn)) for angle, far in spokes
    ]


def _draw_number(rng: random.Random, canvas: Image.Image, digit: str) -> list[tuple[float, float, int]]:
    """Draws a number in Pillow's own font, at a random place."""
    width, height = canvas.size
    image = _digit(rng, digit, rng.uniform(0.35, 0.6) * min(height, 1.3 * width))
    x, y = rng.uniform(0, max(0, width - image.width)), rng.uniform(0, max(0, height - image.height))
    canvas.paste(_ink(rng), (round(x), round(y)), image)
    return [(x + image.width / 2, y + image.height / 2, _DIGITS + int(digit))]


def _digit(rng: random.Random, digit: str, height: float) -> Image.Image:
    """A mask of one digit, turned and slanted a little, cut to its ink."""
    font = ImageFont.load_default(height * 1.35)
    left, top, right, bottom = font.getbbox(digit)
    thick = round(rng.choice((0, 0, 0.02, 0.04)) * height)
    mask = Image.new("L", (round(right - left) + 2 * thick + 2, round(bottom - top) + 2 * thick + 2))
    ImageDraw.Draw(mask).text((thick + 1 - left, thick + 1 - top), digit, 255, font, stroke_width=thick)
    slant = rng.uniform(-0.06, 0.06)
    wider = round(abs(slant) * mask.height)
    mask = mask.transform(
        (mask.width + wider, mask.height), Image.Transform.AFFINE,
        (1, slant, -wider if slant > 0 else 0, 0, 1, 0), Image.Resampling.BILINEAR,
    )  # fmt: skip
    mask = mask.rotate(rng.uniform(-3, 3), Image.Resampling.BILINEAR, expand=True)
    return mask.crop(mask.getbbox())


def _draw_bars(
    rng: random.Random, canvas: Image.Image, bars: tuple[tuple[str, int], ...]
) -> list[tuple[float, float, int]]:
    """Draws bars on a line, perhaps with an axis at the left and grid lines."""
    pen = ImageDraw.Draw(canvas)
    width, height = canvas.size
    left, right = rng.uniform(0.05, 0.16) * width, rng.uniform(0.88, 0.96) * width
    top, bottom = rng.uniform(0.05, 0.2) * height, rng.uniform(0.84, 0.95) * height
    line = max(1, round(0.008 * (width + height)))
    if rng.random() < 0.3:
        for step in range(1, 5):
            y = bottom - step / 4 * (bottom - top)
            pen.line((left, y, right, y), (200, 200, 200), max(1, line // 2))
    slot = (right - left) / len(bars)
    share = rng.uniform(0.5, 0.85)
    marks = []
    for index, (colour, percent) in enumerate(bars):
        x = left + (index + 0.5) * slot
        y = bottom - percent / 100 * (bottom - top)
        pen.rectangle((x - share * slot / 2, y, x + share * slot / 2, bottom), fill=_hue(rng, colour))
        extreme = 1 if percent == 100 else 2 if percent == min(height for _, height in bars) else 0
        kind = _DIGITS + 10 + extreme * len(COLOURS) + list(COLOURS).index(colour)
        marks.append((x, min(y + 0.03 * height, bottom), kind))
    axis = (60, 60, 60)
    pen.line((left, bottom, right, bottom), axis, line)
    if rng.random() < 0.6:
        pen.line((left, top, left, bottom), axis, line)
    return marks


_MARKS_OF: dict[str, Callable[[random.Random, Image.Image, Any], list[tuple[float, float, int]]]] = {
    "shapes": _draw_shapes, "number": _draw_number, "bars": _draw_bars,
}  # fmt: skip
