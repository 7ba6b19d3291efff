"""Published timings of known kernels and engines on an H100, beside what the model makes of the same work.

They keep the model honest: `tests/tools` asks that each of `CHECKS` is within 20 % by the expected assumptions. What
the model does not describe stands in `BEYOND`, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from runtime.device.emulator.driver.architectures import H100
from tools.kernel_costs.latencies import Timing
from tools.kernel_costs.launch_lists import Launched
from tools.kernel_costs.roofline import megakernel_s, prefill, product, streamed

MOST_ERROR = 0.2
EXPECTED = Timing(H100)


@dataclass(frozen=True, slots=True)
class Published:
    """Work whose time somebody else measured on an H100 SXM.

    Attributes:
        work, source: what was measured, and where it is reported.
        measured_s: seconds.
        modelled_s: by the expected assumptions.
        because: why the model does not describe it; "" if it does.
    """

    work: str
    source: str
    measured_s: float
    modelled_s: Callable[[], float]
    because: str = ""

    @property
    def error(self) -> float:
        return self.modelled_s() / self.measured_s - 1.0


def _one_product(m: int, n: int, k: int) -> float:
    """Of a library: as many blocks as cover the weight in tiles of 64 columns, launched alone."""
    launched = Launched("product", blocks=-(-n // 64) * 4, threads=256, product=(m, n, k), weight_bytes=2 * n * k)
    return streamed(launched, EXPECTED).seconds


def _engine_step(layers: int, hidden: int, inner: int, qkv: int, vocabulary: int) -> float:
    """A decode step of an engine that launches ten kernels a layer in a graph, none dependently: four products,
    attention and its combination, two norms, rotation with the write of keys, the gated unit."""

    def matrix(n: int, k: int) -> float:
        return _one_product(1, n, k)

    products = matrix(qkv, hidden) + matrix(hidden, hidden) + matrix(2 * inner, hidden) + matrix(hidden, inner)
    attention = Launched("attention", blocks=264, threads=128, shared_bytes=64 << 10)
    cached_bytes = 2 * (qkv - hidden) * 256  # keys and values of 256 tokens
    small = 5 * EXPECTED.small_s(is_dependent=False)
    layer = products + EXPECTED.attention_s(attention, cached_bytes) + small
    return layers * layer + matrix(vocabulary, hidden) + 4 * EXPECTED.small_s(is_dependent=False)


def _flops_s(flops: float, tflops: float) -> float:
    return flops / (1e12 * tflops)


def _attention_flops(length: int, heads: int, head_dim: int, *, is_causal: bool) -> float:
    return 4.0 * heads * length**2 * head_dim / (2 if is_causal else 1)


_FA3 = "FlashAttention-3, arXiv 2407.08608, figure 5"
_FAST_CU = "pranjalssh/fast.cu, README"
_HUMMING = "inclusionAI/humming, benchmarks"
_LLAMA_1B_BYTES = 2 * 1.236e9

CHECKS = (
    Published("torch (cuBLAS) bf16, 1 x 8192 x 8192", _HUMMING, _flops_s(2 * 8192**2, 2.68),
              lambda: _one_product(1, 8192, 8192)),
    Published("torch (cuBLAS) bf16, 16 x 8192 x 8192", _HUMMING, _flops_s(32 * 8192**2, 42.1),
              lambda: _one_product(16, 8192, 8192)),
    Published("bf16 8192³ by tiles of 128 x 256, clusters of 2 (kernel 7)", _FAST_CU, _flops_s(2 * 8192**3, 799.1),
              lambda: product(8192, 8192, 8192, EXPECTED).seconds),
    Published("bf16 6144³, the same kernel", _FAST_CU, _flops_s(2 * 6144**3, 774.4),
              lambda: product(6144, 6144, 6144, EXPECTED).seconds),
    Published("FlashAttention-3, 16 heads of 128, 8k tokens, causal", _FA3,
              _flops_s(_attention_flops(8192, 16, 128, is_causal=True), 602),
              lambda: prefill(8192, 16, 16, 128, EXPECTED).seconds),
    Published("the same, 16k tokens, not causal", _FA3,
              _flops_s(_attention_flops(16384, 16, 128, is_causal=False), 648),
              lambda: prefill(16384, 16, 16, 128, EXPECTED, is_causal=False).seconds),
    Published("SGLang, Llama-3.1-8B bf16, one sequence, a step", "docs.sglang.io, speculative decoding: 158.34 tok/s",
              1 / 158.34, lambda: _engine_step(32, 4096, 14336, 6144, 128256)),
    Published("SGLang, Llama-3.2-1B bf16, one sequence, a step",
              "Hazy Research, \"Look Ma, No Bubbles\": 1.5 times a megakernel at 78 % of the bandwidth",
              1.5 * _LLAMA_1B_BYTES / (0.78 * H100.memory_bytes_per_s),
              lambda: _engine_step(16, 2048, 8192, 3072, 128256)),
    Published("a megakernel, Llama-3.2-1B bf16, one sequence, a step",
              "the same page: 78 % of the bandwidth", _LLAMA_1B_BYTES / (0.78 * H100.memory_bytes_per_s),
              lambda: megakernel_s(EXPECTED, _LLAMA_1B_BYTES, 2 * 16 * 256 * 1024, 16)),
)  # fmt: skip

BEYOND = (
    Published("Humming, W4A16, 1 x 8192 x 8192 (34.6 MB)", _HUMMING, _flops_s(2 * 8192**2, 5.99),
              lambda: streamed(Launched("product", blocks=512, threads=256, weight_bytes=34_600_000), EXPECTED).seconds,
              "widening four bits costs instructions, which are not counted here"),
)  # fmt: skip
