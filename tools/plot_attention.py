"""Draws the attention of a prompt: the softmax weights of every layer and head, as small heat maps.

    python -m tools.plot_attention models/demo "What is 17 plus 25?" --out attention.svg
    python -m tools.plot_attention MODEL PROMPT --layer 2 --head 5 --device cuda --out head.png

The prompt runs through the model with attention's naive kernel, which leaves its weights in memory
(`numba_kernels.cuda.attention.naive`). Rows are queries, columns keys, both from the first token; white is a weight of
0 and dark a weight of 1, by its square root. Above the diagonal everything is white: attention is causal.
An SVG names layers, heads and, for a single map, the tokens; a PNG holds the maps alone.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import struct
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from models.checkpoints.hub import resolve_model
from numba_kernels.cuda import attention
from runtime.backends import cuda
from runtime.bench.svg import page, text
from runtime.device.device import best_device
from runtime.device.gpu import Gpu
from runtime.engine.make_engine import build_engine
from runtime.errors import InvalidArgumentError, XservError
from runtime.tensor.tensor import Tensor
from tokenizer import Tokenizer

MOST_TOKENS = 256
DARK = np.array([20, 40, 110], np.float32)
GAP = 6


def attention_weights(model: str, token_ids: Sequence[int], device: str = "emulated") -> np.ndarray:
    """The softmax weights of a prompt, ``[layers, heads, queries, keys]`` float32, computed in float32.

    Raises:
        InvalidArgumentError: for the cpu, and for no tokens or more than `MOST_TOKENS`.
        XservError: if the model cannot be loaded, or the device is not available.
    """
    if not 1 <= len(token_ids) <= MOST_TOKENS:
        message = f"the prompt has {len(token_ids)} tokens, must be 1 to {MOST_TOKENS}"
        raise InvalidArgumentError(message, param="prompt")
    gpu = Gpu.of(device)
    engine = build_engine(
        model, device=device, dtype="float32", max_num_seqs=1, max_num_batched_tokens=MOST_TOKENS,
        kv_cache_bytes=64 << 20,
    )  # fmt: skip
    with _observed(gpu) as layers:
        engine.logits(token_ids)
    return np.stack(layers)


@contextlib.contextmanager
def _observed(gpu: Gpu) -> Iterator[list[np.ndarray]]:
    """A context in which the GPU's attention uses the naive kernel, and each call adds its [heads, queries, keys]."""
    found: list[np.ndarray] = []

    def observe(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Any, group: int, pages: tuple[int, int, int], scale: float,
        window: int | None, sinks: Tensor | None, softcap: float | None, *others: Any,
    ) -> Tensor:  # fmt: skip
        tokens, heads, head_dim = q.shape
        _, kv_heads, block_size, _ = k_cache.shape
        table = batch.block_tables[group]
        plan = attention.plan(
            num_tokens=tokens, num_seqs=batch.num_seqs, max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len, num_q_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
            table_width=table.shape[1], dtype=q.dtype.ptx, block_size=block_size, window=window,
            has_sinks=sinks is not None, softcap=softcap, tier="naive",
        )  # fmt: skip
        result = Tensor.zeros((tokens, heads * head_dim), q.dtype, q.device)
        workspace = gpu.allocate(plan.workspace_bytes)
        gpu.launch(
            plan.launch,
            *plan.arguments(
                q.address, k_cache.address, v_cache.address, result.address, workspace.address, 0,
                batch.query_start.address, batch.seq_lens.address, table.address, scale,
                0 if sinks is None else sinks.address,
            ),
        )  # fmt: skip
        weights = np.empty((tokens, heads, plan.workspace_columns), np.float32)
        gpu.read(workspace.address, weights)
        found.append(weights[:, :, : batch.max_seq_len].transpose(1, 0, 2))
        return result

    with patch.object(cuda, "attention", observe):
        yield found


def pixels_of(weights: np.ndarray, scale: int) -> np.ndarray:
    """[queries, keys] → RGB bytes [queries * scale, keys * scale, 3]."""
    share = np.sqrt(np.clip(weights, 0, 1), dtype=np.float32)[..., None]
    colours: np.ndarray = np.rint(255 + share * (DARK - 255)).astype(np.uint8)
    return colours.repeat(scale, axis=0).repeat(scale, axis=1)


def png(pixels: np.ndarray) -> bytes:
    """RGB bytes [height, width, 3] as a PNG file (https://www.w3.org/TR/png-3/)."""
    height, width, _ = pixels.shape
    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # each begins with its filter: none
    rows[:, 1:] = pixels.reshape(height, -1)
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows.tobytes(), 9)),
        (b"IEND", b""),
    ]
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + body


def png_grid(weights: np.ndarray) -> bytes:
    """[layers, heads, queries, keys]: a row of maps for each layer, on grey."""
    scale = _scale(weights)
    size = weights.shape[-1] * scale + GAP
    canvas = np.full((weights.shape[0] * size + GAP, weights.shape[1] * size + GAP, 3), 200, np.uint8)
    for layer, heads in enumerate(weights):
        for head, each in enumerate(heads):
            top, left = layer * size + GAP, head * size + GAP
            canvas[top : top + size - GAP, left : left + size - GAP] = pixels_of(each, scale)
    return png(canvas)


def svg_grid(weights: np.ndarray, layers: Sequence[int], heads: Sequence[int], tokens: Sequence[str]) -> str:
    """The same with names; `tokens` label the map if there is only one."""
    scale, count = _scale(weights), weights.shape[-1]
    side, is_one = count * scale, len(layers) == len(heads) == 1
    left, top = (110, 130) if is_one else (60, 30)
    width, height = left + len(heads) * (side + GAP) + GAP, top + len(layers) * (side + GAP) + GAP
    lines: list[str] = []
    for row, layer in enumerate(layers):
        y = top + row * (side + GAP)
        if not is_one:
            lines.append(text(4, y + side / 2, f"layer {layer}"))
        for column, head in enumerate(heads):
            x = left + column * (side + GAP)
            if row == 0 and not is_one:
                lines.append(text(x, top - 8, f"head {head}"))
            data = base64.b64encode(png(pixels_of(weights[row, column], 1))).decode()
            lines.append(
                f'<image x="{x}" y="{y}" width="{side}" height="{side}" style="image-rendering:pixelated" '
                f'href="data:image/png;base64,{data}"/>'
                f'<rect x="{x}" y="{y}" width="{side}" height="{side}" fill="none" stroke="#999"/>'
            )
    if is_one:
        lines.append(text(4, 16, f"layer {layers[0]}, head {heads[0]}"))
        for number, token in enumerate(tokens):
            middle = (number + 0.8) * scale
            lines.append(text(left - 4, top + middle, token, anchor="end"))
            lines.append(f'<g transform="translate({left + middle:g} {top - 4}) rotate(-90)">{text(0, 0, token)}</g>')
    return page(lines, width, height, font_size=min(scale, 14) if is_one else 11)


def _scale(weights: np.ndarray) -> int:
    """Pixels a weight: a map alone is drawn large."""
    count: int = weights.shape[-1]
    most = 480 if weights.shape[0] == weights.shape[1] == 1 else 96
    return max(1, most // count)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.plot_attention", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", help="a folder or a hub id, with its tokenizer")
    parser.add_argument("prompt")
    parser.add_argument("--layer", type=int, help="this one alone")
    parser.add_argument("--head", type=int, help="this one alone")
    parser.add_argument("--device", default="auto", help="cuda:N or emulated; auto: a GPU where there is one")
    parser.add_argument("--out", type=Path, default=Path("attention.svg"), help="ends in .svg or .png")
    options = parser.parse_args(arguments)
    if options.out.suffix not in (".svg", ".png"):
        parser.error(f"--out {options.out} must end in .svg or .png")
    try:
        return _draw(parser, options)
    except XservError as error:
        parser.error(str(error))


def _draw(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    device = options.device
    if device == "auto":
        device = best_device().type if best_device().kind == "cuda" else "emulated"
    folder = resolve_model(options.model)
    tokenizer = Tokenizer.from_pretrained(folder)
    ids = tokenizer.encode(options.prompt)
    weights = attention_weights(str(folder), ids, device)
    chosen = []
    for name, number, count in (("layer", options.layer, weights.shape[0]), ("head", options.head, weights.shape[1])):
        if number is not None and not 0 <= number < count:
            parser.error(f"--{name} {number} must be 0 to {count - 1}")
        chosen.append(range(count) if number is None else range(number, number + 1))
    layers, heads = chosen
    weights = weights[layers.start : layers.stop, heads.start : heads.stop]
    if options.out.suffix == ".png":
        options.out.write_bytes(png_grid(weights))
    else:
        tokens = [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in ids]
        options.out.write_text(svg_grid(weights, layers, heads, tokens), encoding="utf-8")
    size = options.out.stat().st_size
    print(f"{options.out}: {len(layers)} x {len(heads)} maps of {len(ids)} tokens, {size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
