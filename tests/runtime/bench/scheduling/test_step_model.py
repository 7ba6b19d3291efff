"""Step-time models: the fit against coefficients that made the times, rooflines and links against
arithmetic by hand, and stages in virtual time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from models.configuration.config import ModelConfig
from models.errors import ConfigError
from models.registry import parse_config
from runtime.bench.load.traces import Trace, TraceRequest
from runtime.bench.metrics import BenchmarkError
from runtime.bench.scheduling.roofline import (
    GPUS,
    GpuRates,
    Link,
    RooflineStepModel,
    find_config,
    link_of,
    pipeline_of,
    rooflines,
)
from runtime.bench.scheduling.simulation import simulate
from runtime.engine.scheduling.step_model import (
    LEAST_STEPS,
    TERMS,
    LinearStepModel,
    Pipeline,
    StepFeatures,
    features_of,
    fit,
    non_negative_least_squares,
    window_shares,
)
from runtime.errors import InvalidArgumentError
from tests.runtime.bench.scheduling.test_simulation import TenthOfASecondPerToken, limits, trace


def test_features() -> None:
    # A decode at position 9 sees 10 tokens; three tokens from position 5 see 6 + 7 + 8.
    assert features_of([(9, 1), (5, 3), (0, 1)]) == StepFeatures(
        tokens=5, sequences=3, prefill_pairs=21, decode_context=11
    )
    assert features_of([]) == StepFeatures(0, 0, 0, 0)


def test_layers_with_a_window_see_its_tokens_alone() -> None:
    windows = (None, 4, 7, 4, None, 1)
    shares = window_shares(windows)
    assert shares == ((1, 1 / 6), (4, 2 / 6), (7, 1 / 6))
    assert window_shares((None, None)) == ()
    chunks = [(9, 1), (5, 3), (0, 1), (0, 12), (2, 2), (3, 1), (30, 40)]
    pairs = context = 0.0
    for window in windows:
        for start, count in chunks:
            seen = sum(min(position + 1, window or position + 1) for position in range(start, start + count))
            pairs += 0 if count == 1 else seen
            context += seen if count == 1 else 0
    found = features_of(chunks, shares)
    assert found[:2] == (60, 7)
    assert found[2:] == (pytest.approx(pairs / 6), pytest.approx(context / 6))


def random_steps(count: int) -> list[StepFeatures]:
    generator = np.random.default_rng(0)
    steps = []
    for _ in range(count):
        decodes = [(int(start), 1) for start in generator.integers(0, 2000, generator.integers(0, 40))]
        prefill = [(int(generator.integers(0, 1000)), int(generator.integers(2, 500)))] * int(generator.integers(0, 3))
        steps.append(features_of([*decodes, *prefill] or [(0, 1)]))
    return steps


def test_fit_finds_the_coefficients_that_made_the_times() -> None:
    truth = LinearStepModel((1e-3, 2e-5, 3e-5, 0.0, 1e-4, 5e-5, 2e-5, 0.0, 1e-8, 2e-8))
    steps = random_steps(300)
    found = fit(steps, [truth.seconds(step) for step in steps])
    assert found.model.coefficients == pytest.approx(truth.coefficients, rel=1e-4, abs=1e-9)
    assert found.num_steps == 300
    assert found.relative_error < 1e-6
    assert abs(found.total_error) < 1e-6


def test_fit_keeps_the_total_under_noise_and_no_term_negative() -> None:
    truth = LinearStepModel((2e-3, 0.0, 3e-5, 1e-3, 0.0, 0.0, 0.0, 2e-5, 1e-8, 2e-8))
    steps = random_steps(400)
    noise = np.random.default_rng(1).uniform(0.7, 1.3, len(steps))
    found = fit(steps, [float(truth.seconds(step) * factor) for step, factor in zip(steps, noise)])
    assert min(found.model.coefficients) >= 0.0
    assert abs(found.total_error) < 0.03
    probe = features_of([(500, 1)] * 10 + [(0, 256)])
    assert found.model.seconds(probe) == pytest.approx(truth.seconds(probe), rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_non_negative_least_squares_is_optimal(seed: int) -> None:
    """The conditions of Karush, Kuhn and Tucker: no gradient descends from zero, none is left where x > 0."""
    generator = np.random.default_rng(seed)
    a, b = generator.normal(size=(30, 6)), generator.normal(size=30)
    x = non_negative_least_squares(a, b)
    gradient = a.T @ (a @ x - b)
    assert (x >= 0.0).all()
    assert (gradient > -1e-9).all()
    assert np.abs(gradient[x > 0.0]).max(initial=0.0) < 1e-9
    assert 0 < (x > 0.0).sum() < 6


def test_what_cannot_be_fitted_is_refused() -> None:
    steps = random_steps(LEAST_STEPS)
    with pytest.raises(InvalidArgumentError, match="at least"):
        fit(steps[:-1], [1.0] * (LEAST_STEPS - 1))
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidArgumentError, match="positive"):
            fit(steps, [bad] + [1.0] * (LEAST_STEPS - 1))


def test_json() -> None:
    model = LinearStepModel(tuple(float(number) for number in range(len(TERMS))))
    assert LinearStepModel.from_json(model.as_json()) == model
    for name, value in (("constant", -1.0), ("tokens", float("nan")), ("tokens", True), ("tokens", "1")):
        with pytest.raises(InvalidArgumentError, match=name):
            LinearStepModel.from_json({**model.as_json(), name: value})
    with pytest.raises(InvalidArgumentError, match="exactly the terms"):
        LinearStepModel.from_json({"constant": 1.0})


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2, "intermediate_size": 16, "vocab_size": 10,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip


def roofline(config: ModelConfig, rates: GpuRates, **options: Any) -> RooflineStepModel:
    """The roofline of a model in one stage."""
    [model] = rooflines(config, rates, **options)
    return model


def test_roofline_by_hand() -> None:
    # A layer's weights: q and o 8x8 each, k and v 8x4 each, three of 8x16: 64+64+32+32+384 = 576 values.
    model = roofline(parse_config(dict(CONFIG)), GpuRates(1000.0, 1e9, 1), overhead_s=0.25)
    assert model.weight_bytes == 2 * (3 * 576 + 80)
    assert model.kv_bytes_per_token == 2 * 2 * 3 * 4
    step = features_of([(9, 1), (5, 3)])
    moved = 3616 + 48 * (10 + 4)
    assert model.seconds(step) == pytest.approx(moved / 1000.0 + 0.25)
    flops = 2 * 3 * 576 * 4 + 4 * 3 * 8 * (21 + 10) + 2 * 80 * 2
    computing = roofline(parse_config(dict(CONFIG)), GpuRates(1e12, 100.0, 1), overhead_s=0.0)
    assert computing.seconds(step) == pytest.approx(flops / 100.0)


def test_roofline_of_layers_with_windows_by_hand() -> None:
    windows = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True}
    windows |= {"sliding_window": 4, "max_window_layers": 1, "num_hidden_layers": 4}
    config = parse_config({**CONFIG, **windows})
    assert config.layer_windows == (None, 4, 4, 4)
    rates = GpuRates(1000.0, 1e9, 1)
    model = roofline(config, rates, overhead_s=0.0)
    assert model.kv_bytes_per_token == 2 * 2 * 4 * 4
    assert model.kv_bytes_per_block_token == 2 * 2 * 4  # four groups of a layer each
    step = features_of([(9, 1), (1, 1)], window_shares(config.layer_windows))
    # Keys of one layer: the full one reads 10 and 2, the others 4 and 2; each layer writes those of two tokens.
    moved = model.weight_bytes + 2 * 2 * 4 * ((12 + 3 * 6) + 4 * 2)
    assert model.seconds(step) == pytest.approx(moved / 1000.0)


def test_rates_are_below_the_data_sheets() -> None:
    assert GPUS["h200"].bytes_per_s == 4.3e12 < 4.8e12
    assert GPUS["h200"].flops_per_s == 790e12 < 989e12


def test_ranks_by_hand() -> None:
    """Two ranks: half of the weights and of the keys each, two sums a layer of the hidden states, logits gathered."""
    link = Link(0.5, 100.0)
    model = roofline(parse_config(dict(CONFIG)), GpuRates(1000.0, 1e9, 1), overhead_s=0.25, num_ranks=2, link=link)
    assert model.weight_bytes == 3 * 576 + 80
    assert model.kv_bytes_per_token == 2 * 2 * 3 * 2
    step = features_of([(9, 1), (5, 3)])
    moved = 1808 + 24 * (10 + 4)
    told = 6 * (0.5 + 1.0 * 2 * 8 * 4 / 100.0) + (0.5 + 0.5 * 4 * 10 * 2 / 100.0)
    assert model.seconds(step) == pytest.approx(moved / 1000.0 + told + 0.25)
    computing = roofline(parse_config(dict(CONFIG)), GpuRates(1e12, 100.0, 1), overhead_s=0.0, num_ranks=2, link=link)
    flops = 2 * 3 * 576 * 4 + 4 * 3 * 8 * (21 + 10) + 2 * 80 * 2
    assert computing.seconds(step) == pytest.approx(flops / 2 / 100.0 + told)


def test_ranks_that_share_a_head_read_it_each() -> None:
    """Of two heads of keys four ranks have one each: in all twice as many as one rank."""
    config, link = parse_config(dict(CONFIG)), Link(0.0, 1e12)
    alone, four = (roofline(config, GPUS["h200"], overhead_s=0.0, num_ranks=n, link=link) for n in (1, 4))
    assert 4 * four.kv_bytes_per_token == 2 * alone.kv_bytes_per_token
    assert 4 * four.weight_bytes == alone.weight_bytes + 3 * 2 * (2 * 8 * 4)


def test_stages_by_hand() -> None:
    """All together have what one has; the head lies in the last."""
    config = parse_config(CONFIG | {"num_hidden_layers": 5})
    alone = roofline(config, GpuRates(1000.0, 1e9, 1), overhead_s=0.0)
    stages = rooflines(config, GpuRates(1000.0, 1e9, 1), overhead_s=0.0, num_stages=2)
    assert [stage.kv_bytes_per_token for stage in stages] == [3 * 16, 2 * 16]
    assert sum(stage.weight_bytes for stage in stages) == alone.weight_bytes
    step = features_of([(9, 1), (5, 3)])
    assert sum(stage.seconds(step) for stage in stages) == pytest.approx(alone.seconds(step))
    assert stages[0].flops_per_logits_row == 0
    pipeline = pipeline_of(config, stages, Link(2.0, 10.0))
    assert pipeline.sent_s(step) == pytest.approx(2.0 + 2 * 8 * 4 / 10.0)


def test_what_cannot_be_split_is_refused() -> None:
    config = parse_config(dict(CONFIG))
    with pytest.raises(BenchmarkError, match="4 heads, 2 of keys, are not divided by 3 ranks"):
        roofline(config, GPUS["h200"], overhead_s=0.0, num_ranks=3, link=Link(0.0, 1.0))
    with pytest.raises(BenchmarkError, match="2 ranks need a link"):
        roofline(config, GPUS["h200"], overhead_s=0.0, num_ranks=2)
    with pytest.raises(ConfigError, match="3 layers cannot be split over 4 stages"):
        rooflines(config, GPUS["h200"], overhead_s=0.0, num_stages=4)


def test_a_large_model_fits_where_its_ranks_or_stages_have_room() -> None:
    """Llama 3.1 70B: 139 GB of weights in bf16 are read in a step."""
    config, nvlink = find_config("llama-3.1-70b"), link_of("nvlink4")
    blocks = {
        shape: min(
            stage.num_blocks(16, 0.9)
            for stage in rooflines(
                config, GPUS["h200"], overhead_s=0.0, num_ranks=shape[0], num_stages=shape[1], link=nvlink
            )
        )
        for shape in ((1, 1), (2, 1), (1, 2), (4, 2), (8, 1))
    }
    assert blocks[1, 1] == 0
    assert blocks[2, 1] == pytest.approx((0.9 * 141e9 - 69.5e9) / (16 * 163_840), rel=0.01)
    assert blocks[1, 2] == pytest.approx(blocks[2, 1], rel=0.05)
    assert blocks[4, 2] == pytest.approx(blocks[8, 1], rel=0.05)


def test_links_that_are_none() -> None:
    assert link_of("3,100") == Link(3e-6, 100e9)
    for text, words in (
        ("3,", "must be numbers"), ("-1,5", "bandwidth must be positive"), ("nan,5", "not negative"),
        ("1,inf", "positive"), ("ethernet", "must be nvlink4, infiniband400"),
    ):  # fmt: skip
        with pytest.raises(BenchmarkError, match=words):
            link_of(text)


SECOND = TenthOfASecondPerToken()


def test_two_stages_by_hand() -> None:
    """Two prompts of 5, two answers of 2: each is in a step of its own, and while one is in the second stage the other
    is in the first. On the way between the stages a step is half a second."""
    run = simulate(
        trace((0.0, 5, 2), (0.0, 5, 2)), limits(max_num_batched_tokens=32), Pipeline((SECOND, SECOND), lambda _: 0.5)
    )
    # A prompt takes 1.5 s in a stage, a decode 1.1. Both prompts are in the first step: 2.0, 0.5, 2.0.
    # Then each decodes in a step of its own: A 4.5 to 5.6, B 5.6 to 6.7; in the second stage A 6.1 to 7.2, B to 8.3.
    first, second = (request.sequences[0] for request in run.requests)
    assert (first.first_token_s, second.first_token_s) == (pytest.approx(4.5), pytest.approx(4.5))
    assert (first.last_token_s, second.last_token_s) == (pytest.approx(7.2), pytest.approx(8.3))
    report = run.report()
    assert report["num_steps"] == 3
    assert report["busy_share"] == [pytest.approx(1.0)]
    assert report["idle_share_by_stage"] == [pytest.approx(1 - 4.2 / 8.3)] * 2


def test_stages_are_busy_where_several_steps_are_open() -> None:
    """Sixteen decodes of 40 tokens each: of two equal stages neither waits but at the beginning and the end; of unequal
    ones the slow one."""
    requests = Trace("t", tuple(TraceRequest(0.0, 2, 40) for _ in range(16)))
    idle = {}
    for name, stages in (("equal", (SECOND, SECOND)), ("unequal", (SECOND, Thrice()))):
        run = simulate(requests, limits(), Pipeline(stages, lambda _: 0.0))
        idle[name] = run.report()["idle_share_by_stage"]
        run.replicas[0].scheduler.check_invariants()
        assert all(request.sequences[0].num_output_tokens == 40 for request in run.requests)
    assert max(idle["equal"]) < 0.1
    assert idle["unequal"][0] > 0.6
    assert idle["unequal"][1] < 0.1


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_no_request_is_lost_in_stages_where_blocks_are_few(num_stages: int) -> None:
    requests = trace(*((0.3 * i, 3 + i % 5, 6 + i % 7) for i in range(30)))
    settings: dict[str, Any] = {"num_blocks": 12, "max_model_len": 24, "max_num_seqs": 8}
    run = simulate(requests, limits(**settings), Pipeline((SECOND,) * num_stages, lambda _: 0.1))
    assert run.report()["num_preemptions"] > 0
    assert [request.sequences[0].num_output_tokens for request in run.requests] == [6 + i % 7 for i in range(30)]
    assert run.replicas[0].pool.num_free == 12


class Thrice:
    """Three times as slow as the other."""

    def seconds(self, features: StepFeatures) -> float:
        return 3 * SECOND.seconds(features)
