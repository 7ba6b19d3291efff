"""A request's prediction: followed from its beginning, found again behind a difference, counted, and off by request."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from runtime.engine.errors import RequestError
from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.speculation.ngram import PredictionDrafter
from runtime.engine.speculation.speculator import Speculator
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
