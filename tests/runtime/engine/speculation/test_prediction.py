"""A request's prediction: followed from its beginning, found again behind a difference, counted, and off by request."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from runtime.engine.config import EngineConfig
from runtime.engine.errors import RequestError
from runtime.engine.make_engine import build_engine, describe_engine, engine_of, limits_of, loaded_model
from runtime.engine.messages import EngineRequest
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.speculation.draft_model import DraftModelDrafter
from runtime.engine.speculation.ngram import PredictionDrafter
from runtime.engine.speculation.speculator import Speculator
from tests.models.folders import load_golden, write_model
from tests.runtime.engine.fakes import VOCAB_SIZE, Collected, make_engine, request, run_to_end
from tests.runtime.engine.speculation.test_ngram import grow, sequence


def predicting(ids: list[int]) -> Sequence:
    one = sequence([1, 2, 3])
    one.request.prediction = np.array(ids, np.int32)
    return one


def test_an_answer_is_followed_and_found_again() -> None:
    drafter, one = PredictionDrafter(), predicting([10, 11, 12, 13, 14, 15, 16, 17])
    assert drafter.propose(one, 3)[0].tolist() == [10, 11, 12]
    grow(one, [10, 11])
    assert drafter.propose(one, 9)[0].tolist() == [12, 13, 14, 15, 16, 17]
    grow(one, [50, 51])  # not predicted
    assert drafter.propose(one, 3)[0].tolist() == []
    grow(one, [13])
    assert drafter.propose(one, 3)[0].tolist() == []  # one token is no place
    grow(one, [14])
    assert drafter.propose(one, 3)[0].tolist() == [15, 16, 17]
    grow(one, [15, 16, 17])
    assert drafter.propose(one, 3)[0].tolist() == []  # over
    grow(one, [9, 12, 13])
    assert drafter.propose(one, 2)[0].tolist() == [14, 15]
    drafter.end(one)
    assert not drafter._followed


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_predicted_tokens_are_proposed_and_counted(overlap: str) -> None:
    def run(prediction: list[int], speculates: bool = True) -> Collected:
        engine = make_engine(max_num_seqs=4, overlap=overlap)  # type: ignore[arg-type]
        engine.use(Speculator(None, 7, VOCAB_SIZE, fixed=True))
        asked = request("x", [1, 2, 3], max_tokens=24, ignore_eos=True)
        engine.add(msgspec.structs.replace(asked, prediction=prediction, speculates=speculates))
        return run_to_end(engine)["x"]

    plain = run([])
    answer = plain.token_ids(0)
    assert plain.of(0)[-1].proposals is None
    right = run(answer)
    assert right.token_ids(0) == answer
    counts = right.of(0)[-1].proposals
    assert counts is not None
    assert 12 <= counts.num_kept == counts.num_tried == counts.num_kept_of_prediction
    wrong = run([*answer[:5], 5 if answer[5] != 5 else 6, *answer[6:]])
    assert wrong.token_ids(0) == answer
    counts = wrong.of(0)[-1].proposals
    assert counts is not None
    assert 0 < counts.num_kept_of_prediction < counts.num_tried_of_prediction == counts.num_tried
    off = run(answer, speculates=False)
    assert off.token_ids(0) == answer
    assert off.of(0)[-1].proposals is None


def test_a_prediction_outside_the_vocabulary_is_refused() -> None:
    engine = make_engine()
    with pytest.raises(RequestError, match="prediction"):
        engine.add(msgspec.structs.replace(request("x", [1]), prediction=[VOCAB_SIZE]))


DEMO = Path("models/demo").resolve()
CONFIG = EngineConfig(max_model_len=96, device="cpu", num_blocks=40, max_num_seqs=4, max_num_batched_tokens=16)


def test_a_model_that_drafts_for_itself_is_always_right() -> None:
    """At any temperature, since both draw with the same noise; with more sequences than its pages hold, too."""
    model = loaded_model(DEMO, CONFIG)
    limits = limits_of(model, CONFIG)
    for num_blocks in (40, 7):
        engine = engine_of(DEMO, CONFIG)
        drafter = DraftModelDrafter(model, model.max_positions, model.longrope_threshold, limits, num_blocks)
        speculator = Speculator(drafter, 4, model.config.vocab_size, fixed=True)
        engine.use(speculator)
        for i in range(6):
            temperature = (0.0, 0.7, 1.3)[i % 3]
            params = SamplingParams(max_tokens=20, temperature=temperature, seed=i, ignore_eos=True, top_k=50)
            prompt = [(7 * i + j * j) % 500 + 3 for j in range(5 + 8 * i)]
            engine.add(EngineRequest(request_id=str(i), prompt_token_ids=prompt, params=params))
        while engine.has_work:
            engine.step()
        engine.close()
        counters = speculator.counters
        assert speculator.is_on
        assert counters.num_accepted_tokens == counters.num_draft_tokens > 20
        assert drafter.num_free_blocks == num_blocks


def test_it_shares_the_memory_of_the_pages() -> None:
    alone = describe_engine(DEMO, EngineConfig(max_model_len=96, device="cpu", kv_cache_bytes=1 << 22))
    config = EngineConfig(max_model_len=96, device="cpu", kv_cache_bytes=1 << 22, speculation=f"draft:{DEMO}")
    both = describe_engine(DEMO, config)
    assert both.num_blocks == alone.num_blocks // 2
    assert both.weight_bytes == 2 * alone.weight_bytes
    engine = engine_of(DEMO, config)
    assert engine.info.num_blocks == both.num_blocks
    assert engine.info.kv_cache_bytes == both.kv_cache_bytes <= 1 << 22
    engine.close()


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    other = write_model(tmp_path, load_golden("gpt2_gelu_new"))
    for describe in (describe_engine, engine_of):
        with pytest.raises(RequestError, match=r"vocabulary of \d+ tokens, .* has \d+: both must have the same"):
            describe(DEMO, EngineConfig(max_model_len=48, device="cpu", speculation=f"draft:{other}"))
    renamed = tmp_path / "renamed"
    shutil.copytree(DEMO, renamed)
    text = (renamed / "tokenizer.json").read_text()
    assert '"vocab"' in text
    (renamed / "tokenizer.json").write_text(text.replace('"vocab":', '"vocab": {"x": 0}, "other":', 1))
    with pytest.raises(RequestError, match="has other tokens than"):
        describe_engine(DEMO, EngineConfig(max_model_len=48, device="cpu", speculation=f"draft:{renamed}"))


@pytest.mark.parametrize("text", ["draft:", "draft", "magic", ""])
def test_wrong_names_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match="speculation"):
        build_engine(DEMO, speculation=text)
