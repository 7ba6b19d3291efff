"""A picture through Qwen3-VL-8B's tower on a GPU, by the model of `roofline`: its products, and the least of attention.

    python -m tools.kernel_costs.tower

The products run by the Hopper tiles that are planned for them. Attention runs in the flash tier, which the model does
not know: for it stands only what no kernel can be faster than, its tensor-core work or its exponentials.
"""

from __future__ import annotations

from runtime.device.emulator.driver.architectures import H100, H200
from tools.kernel_costs.latencies import EDGES, Timing
from tools.kernel_costs.roofline import EXPONENTIALS, Band, product

TOKENS, MERGE = 1024, 4
LAYERS, WIDTH, INNER, HEADS, OUT, MERGERS = 27, 1152, 4304, 16, 4096, 4
"""Qwen3-VL-8B's `vision_config`; with a merger behind the last layer and three in between."""

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


def attention_floor_ms(timing: Timing) -> float:
    model = timing.model
    exponentials = LAYERS * HEADS * _PATCHES**2 / (EXPONENTIALS * model.num_sms * model.clock_khz * 1e3)
    return 1e3 * max(flops()[1] / timing.tensor_flops, exponentials)


def main() -> None:
    for name, model in (("H200", H200), ("H100", H100)):
        timings = [Timing(model, edge) for edge in EDGES]
        band = Band.of(lambda timing: (products_ms(timing), ""), timings)
        print(
            f"{name}: {len(PRODUCTS)} products, {flops()[0] / 1e12:.2f} TFLOP: {band.expected:.1f} ms "
            f"({band.fast:.1f} … {band.slow:.1f}); attention, {flops()[1] / 1e12:.2f} TFLOP: "
            f"at least {attention_floor_ms(timings[1]):.1f} ms"
        )


if __name__ == "__main__":
    main()
