"""What a step that tries proposals costs a GPU, beside one that does not: counted by the emulator, and modelled.

    python -m tools.kernel_costs.verification [--model qwen3-8b] [--gpu H200|H100] [--sequences 1,8,32]
                                              [--contexts 1024,8192] [--only counted|modelled]

Counted are the kernels whose work grows with a sequence's tokens: a matrix product, whose weight is read once however
many rows it multiplies, and attention, each by the plan that serves them. Modelled are whole steps (`forecast`), of the
launches that are recorded for them, and how many times as fast decoding gets if each proposal is right with a given
probability and as many are tried as is best: an upper bound, since the engine has to find that out. Prints Markdown.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from runtime.device.emulator.driver.architectures import H100, H200, GpuModel
from tools.gpu.serving.models import MODELS
from tools.kernel_costs.attention_cases import attention_case
from tools.kernel_costs.case import Case
from tools.kernel_costs.counts import Bench
from tools.kernel_costs.forecast import draw_instructions
from tools.kernel_costs.latencies import Timing
from tools.kernel_costs.launch_lists import FactsOf, Step, compiled, decode_step
from tools.kernel_costs.page import table
from tools.kernel_costs.product_cases import gemm_case
from tools.kernel_costs.roofline import Context, step_s

PROPOSALS = (0, 1, 3, 7)
"""Of a sequence; a GPU brings a step to 2, 4 or 8 tokens for each."""

RATES = (0.3, 0.5, 0.7, 0.8, 0.9)


@dataclass(frozen=True, slots=True)
class Verified:
    """Steps of so many sequences of ``context`` tokens. ``seconds``: by proposals of each sequence."""

    num_sequences: int
    context: int
    seconds: dict[int, float]

    def speedup(self, rate: float) -> tuple[float, int]:
        """Tokens a second with the best number of proposals against none, and that number; each proposal is right with
        this probability."""
        plain = self.seconds[0]
        found = [
            (plain / seconds * sum(rate**at for at in range(most + 1)), most) for most, seconds in self.seconds.items()
        ]
        return max(found, key=lambda each: (each[0], -each[1]))


def verified(
    name: str, model: GpuModel, num_sequences: int, context: int, draw: float, facts_of: FactsOf | None
) -> Verified:
    """``draw``: warp instructions of one draw."""
    config, timing, seconds = MODELS[name], Timing(model), {}
    cached = 2 * 2 * config["num_key_value_heads"] * config["head_dim"]
    for most in PROPOSALS:
        step = decode_step(
            config, num_seqs=num_sequences, num_proposals=most, context=context,
            max_model_len=max(8192, 2 * context), arch=model.arch, facts_of=facts_of,
        )  # fmt: skip
        reads = _reads(step, (1 + most) * config["num_attention_heads"] // config["num_key_value_heads"])
        kv_bytes = float(num_sequences * (context + most) * cached * reads)
        seconds[most] = step_s(timing, step, Context(kv_bytes, draw * num_sequences * (1 + most)))
    return Verified(num_sequences, context, seconds)


def _reads(step: Step, rows: int) -> int:
    """How often attention reads a key: the decode tier's tiles have 16 rows at most, and each reads them."""
    return -(-rows // 16) if any(each.name.startswith("attention_decode") for each in step.layer) else 1


def modelled_page(name: str, model: GpuModel, found: Sequence[Verified]) -> str:
    """Steps, and the speed-ups that they allow."""
    steps = [
        [f"{each.num_sequences} x {each.context:,}", *(f"{1e3 * each.seconds[most]:.2f}" for most in PROPOSALS)]
        + [f"{each.seconds[most] / each.seconds[0]:.2f}" for most in PROPOSALS[1:]]
        for each in found
    ]
    columns = [f"{most} (ms)" for most in PROPOSALS] + [f"{most} / 0" for most in PROPOSALS[1:]]
    gains = [
        [f"{each.num_sequences} x {each.context:,}"]
        + [f"{gain:.2f} ({most})" for gain, most in map(each.speedup, RATES)]
        for each in found
    ]
    return "\n\n".join(
        (
            f"{name}, {model.name}: a step by proposals of each sequence",
            table(("sequences x context", *columns), steps),
            "Times as fast as without, by how often a proposal is right (in brackets the best number of proposals)",
            table(("sequences x context", *map(str, RATES)), gains),
        )
    )


def counted_page() -> str:
    """A product and attention for 1, 2, 4 and 8 tokens of a sequence."""
    rows = [list(cells) for cells in _counted()]
    return table(("tokens", "kernel", "shape", "warp instructions", "MB moved", "against one"), rows)


def _counted() -> Iterator[tuple[str, ...]]:
    bench = Bench("sm_90a")
    tokens = [1 + most for most in PROPOSALS]
    sizes = 32, 8, 128
    kinds: list[Callable[[int], Case]] = [
        lambda count: gemm_case("auto", (count, 1024, 2048), "bf16"),
        lambda count: attention_case(None, "bf16", [(2048 - count, count)], sizes=sizes, num_sms=H200.num_sms),
        lambda count: attention_case("flash", "bf16", [(2048 - count, count)], sizes=sizes, num_sms=H200.num_sms),
    ]
    for make in kinds:
        first = 0
        for count in tokens:
            case = make(count)
            counts = bench.count(case.name, case.run)
            first = first or counts.moved_bytes
            yield (
                str(count), ", ".join(counts.kernels), case.shape, f"{counts.warp_instructions:,}",
                f"{counts.moved_bytes / 1e6:.2f}", f"{counts.moved_bytes / first:.2f}",
            )  # fmt: skip


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="qwen3-8b", choices=sorted(MODELS))
    parser.add_argument("--gpu", default="H200", choices=["H100", "H200"])
    parser.add_argument("--sequences", default="1,8,32")
    parser.add_argument("--contexts", default="1024,8192")
    parser.add_argument("--only", choices=["counted", "modelled"])
    options = parser.parse_args()
    if options.only != "modelled":
        print(counted_page())
    if options.only != "counted":
        model = {"H100": H100, "H200": H200}[options.gpu]
        draw = draw_instructions(MODELS[options.model]["vocab_size"], model.arch)
        facts = compiled(model.arch)
        found = [
            verified(options.model, model, int(count), int(context), draw, facts)
            for context in options.contexts.split(",")
            for count in options.sequences.split(",")
        ]
        print(modelled_page(options.model, model, found))


if __name__ == "__main__":
    main()
