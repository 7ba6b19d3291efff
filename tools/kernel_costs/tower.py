"""A picture through Qwen3-VL-8B's tower on a GPU, by the model of `roofline`: its products, and its attention.

    python -m tools.kernel_costs.tower

The products run by the Hopper tiles that are planned for them. Attention runs in the flash tier, by tiles of 128
queries that see all keys: its products by `mma.sync`, of which Hopper does fewer than by wgmma, and with padded heads;
the machine instructions of its main loop are those that were counted for sm_80, from the same source.
"""

from __future__ import annotations

import argparse

from runtime.device.emulator.driver.architectures import H100, H200
from tools.kernel_costs.latencies import EDGES, Timing
from tools.kernel_costs.roofline import EXPONENTIALS, ISSUES, Band, Modelled, per_operation, product

TOKENS, MERGE = 1024, 4
LAYERS, WIDTH, INNER, HEADS, OUT, MERGERS = 27, 1152, 4304, 16, 4096, 4
"""Qwen3-VL-8B's `vision_config`; with a merger behind the last layer and three in between."""

QUERIES = 128
"""Of a tile."""

BLOCKS_PER_SM = 1
"""Of 128 threads and 128 queries with heads of 72, at least."""

MMA_SHARE = 0.63
"""What `mma.sync` reaches of the rate of wgmma on Hopper: an estimate. (62.9 % on average were ascribed to arXiv
2402.13499, where it was looked for and not found; an H200's tower as a whole did 195 TFLOP/s, host included.)"""

_PATCHES = TOKENS * MERGE
_LAYER = ((_PATCHES, 3 * WIDTH, WIDTH), (_PATCHES, WIDTH, WIDTH), (_PATCHES, INNER, WIDTH), (_PATCHES, WIDTH, INNER))
_MERGER = ((TOKENS, MERGE * WIDTH, MERGE * WIDTH), (TOKENS, OUT, MERGE * WIDTH))
PRODUCTS = ((_PATCHES, WIDTH, 2 * 3 * 16**2), *LAYERS * _LAYER, *MERGERS * _MERGER)
"""Rows, outputs and inputs of each."""


def flops() -> tuple[float, float]:
    """Of the products, and of attention."""
    return sum(2.0 * m * n * k for m, n, k in PRODUCTS), 4.0 * LAYERS * _PATCHES**2 * WIDTH


def products_ms(timing: Timing) -> float:
    return 1e3 * sum(product(*each, timing).seconds for each in PRODUCTS)


def attention(timing: Timing) -> Modelled:
    """A layer's attention."""
    model, head_dim, tiles = timing.model, WIDTH // HEADS, -(-_PATCHES // QUERIES)
    depth = -(-head_dim // 16)  # of the scores' products, padded; those with values have no padding
    scores = QUERIES // 16 * (_PATCHES // 8) * depth
    values = QUERIES // 16 * -(-head_dim // 8) * (_PATCHES // 16)
    operations = HEADS * tiles * (scores + values)  # of 16 x 8 x 16
    loop = per_operation("attention", "flash", "2 heads, 512 tokens, head dim 128", "sm_80")
    seconds = model.num_sms * model.clock_khz * 1e3
    exponentials_s = HEADS * tiles * QUERIES * _PATCHES / (EXPONENTIALS * seconds)
    rounds = -(-HEADS * tiles // (BLOCKS_PER_SM * model.num_sms)) * BLOCKS_PER_SM * model.num_sms / (HEADS * tiles)
    return Modelled(
        {
            "tensor cores": rounds * operations * 4096 / (MMA_SHARE * timing.tensor_flops)
            + timing.of("softmax") * exponentials_s,
            "issue": rounds * loop * operations / (ISSUES * seconds),
            "exponentials": exponentials_s,
            "second-level cache": HEADS * tiles * 2 * 2 * _PATCHES * head_dim / timing.of("cache_bandwidth"),
            "memory": 2 * 4 * _PATCHES * WIDTH / timing.bytes_per_s,
        },
        timing.gap_s(is_dependent=False) + timing.of("memory") + timing.of("ends"),
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for name, model in (("H200", H200), ("H100", H100)):
        timings = [Timing(model, edge) for edge in EDGES]
        band = Band.of(lambda timing: (products_ms(timing), ""), timings)
        layer = attention(timings[1])
        seen = Band.of(lambda timing: (1e3 * LAYERS * attention(timing).seconds, attention(timing).limit), timings)
        print(
            f"{name}: {len(PRODUCTS)} products, {flops()[0] / 1e12:.2f} TFLOP: {band.expected:.1f} ms "
            f"({band.fast:.1f} … {band.slow:.1f}); attention of {LAYERS} layers, {flops()[1] / 1e12:.2f} TFLOP: "
            f"{seen.expected:.1f} ms ({seen.fast:.1f} … {seen.slow:.1f}), limited by {seen.limit}; of which "
            + ", ".join(f"{need} {1e3 * LAYERS * value:.1f}" for need, value in layer.needs_s.items())
        )


if __name__ == "__main__":
    main()
