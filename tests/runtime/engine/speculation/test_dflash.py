"""A DFlash drafter in the engine: it says what it would with all known hidden states computed at once, and is right
where it must be; no token changes.

Its arithmetic is held in `tests/models/drafters/test_dflash.py`; whose pairs are where is an EAGLE-3 drafter's matter,
too (`test_eagle3`)."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from models.decoder import Decoder
from models.drafters.dflash import DFlashDrafter, load_dflash
from models.errors import ModelLoadError
from models.registry import load_model
from runtime.batch import Batch
from runtime.engine.config import EngineConfig
from runtime.engine.engine import Engine
from runtime.engine.errors import RequestError
from runtime.engine.make_engine import build_engine, describe_engine
from runtime.engine.messages import EngineRequest
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.speculation.drafter import Drawing, PairChunks
from runtime.engine.speculation.state_proposer import StateProposer
from tests.models.drafters.dflash_cases import CYCLE, VOCAB, write_cycle, write_drafter, write_target
from tests.models.drafters.one_drafter import BlocksAlone
from tests.models.driver import ModelDriver
from tests.models.folders import load_golden, write_model
from tests.runtime.engine.speculation.noted import Proposals, note_proposals
from tests.runtime.engine.speculation.test_eagle3 import TwiceOfThree

Answers = dict[str, list[int]]
rng = random.Random(3)
PROMPTS = {str(number): [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))] for number in range(5)}


def new_engine(folder: Path, **settings: Any) -> tuple[Engine, StateProposer, Proposals]:
    """An engine that tries all that its drafter says, the drafter, and what it says."""
    defaults: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_blocks": 64, "seed": 0, "max_num_seqs": 4}
    engine = build_engine(folder, **{**defaults, **settings})
    return engine, *note_proposals(engine)


def plain_engine(folder: Path, **settings: Any) -> Engine:
    return build_engine(folder, device="cpu", dtype="float32", num_blocks=64, speculation="off", **settings)


def ask(engine: Engine, prompts: dict[str, list[int]] = PROMPTS, **params: Any) -> Answers:
    chosen = SamplingParams(**{"max_tokens": 25, "temperature": 0.0, "ignore_eos": True, "seed": 5, **params})
    answers: Answers = {}
    for name, prompt in prompts.items():
        engine.add(EngineRequest(request_id=name, prompt_token_ids=prompt, params=chosen))
        answers[name] = []
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            answers[output.request_id] += output.new_token_ids
    engine.check_invariants()
    return answers


class AtOnce:
    """What a drafter says greedily behind each part of a text, whose hidden states the model computes in one pass, and
    the drafter anew for each."""

    def __init__(self, model: Decoder, drafter: DFlashDrafter, ids: list[int]) -> None:
        self.drafter, self.ids = drafter, ids
        batches: list[Batch] = []

        def keep(batch: Batch, position: int) -> None:
            batch.auxiliary_layers = drafter.layers
            batches.append(batch)

        ModelDriver(model, complete=keep).step({0: ids})
        self.states: list[NDArray[np.float32]] = [batches[0].kept[layer].array for layer in drafter.layers]

    @cache  # noqa: B019
    def behind(self, num_tokens: int) -> list[int]:
        """Behind so many of the text's tokens."""
        drafter, last = self.drafter, self.ids[num_tokens - 1]
        alone = BlocksAlone(drafter, 16)
        alone.absorb(self.states, num_tokens - 1)
        count = drafter.block_size - drafter.first_proposal
        found: list[int] = []
        while len(found) < count:
            logits = alone.block(last, np.array([last, *found, *[0] * count][:count], np.int32))
            found = logits.argmax(1)[: len(found) + 1 if drafter.is_chained else count].tolist()
        return found


@pytest.mark.parametrize("case", ["dflash", pytest.param("dflash_causal", marks=pytest.mark.exhaustive), "dspark"])
def test_it_says_what_it_would_with_everything_computed_at_once(case: str, tmp_path: Path) -> None:
    """However its sequences were computed: whole, in chunks, in company, without graphs; and where a prompt's beginning
    was found in the cache."""
    folder, own = write_target(tmp_path / "model"), write_drafter(tmp_path / case, case)
    model = load_model(folder, device="cpu", dtype="float32")
    assert isinstance(model, Decoder)
    drafter = load_dflash(own, model, device="cpu", dtype="float32")
    engine = plain_engine(folder)
    plain = ask(engine, max_tokens=12)
    longer = {"longer": PROMPTS["0"] + plain["0"][:8] + PROMPTS["1"]}  # whole pages are found
    prompts, plain = {**PROMPTS, **longer}, {**plain, **ask(engine, longer, max_tokens=12)}
    at_once = {name: AtOnce(model, drafter, prompts[name] + plain[name]) for name in prompts}
    for settings in ({}, {"max_num_batched_tokens": 7}, {"decode_graphs": "off"}, {"overlap": "on"}):
        engine, proposer, said = new_engine(folder, speculation=f"dflash:{own}", **settings)
        assert {**ask(engine, max_tokens=12), **ask(engine, longer, max_tokens=12)} == plain
        proposer.pool.check_invariants([])
        assert engine.speculator is not None
        assert engine.speculator.is_on
        engine.close()
        assert sum(len(ids) > 0 for ids in said.values()) > 40
        for (name, count), ids in said.items():
            wanted = at_once[name].behind(len(prompts[name]) + count)
            assert ids == wanted[: len(ids)], (settings, name, count)


def test_all_proposals_are_right_where_a_cycle_before_the_same_was_said(tmp_path: Path) -> None:
    folder, own = write_cycle(tmp_path)
    prompts = {str(first): [(first + i) % CYCLE for i in range(45 + first)] for first in range(3)}
    plain = ask(plain_engine(folder), prompts)
    assert all(ids == [(45 + 2 * int(first) + i) % CYCLE for i in range(25)] for first, ids in plain.items())
    engine, _, said = new_engine(folder, speculation=f"dflash:{own}", num_speculative_tokens=7)
    assert ask(engine, prompts) == plain
    assert engine.speculator is not None
    counters = engine.speculator.counters
    assert counters.num_accepted_tokens == counters.num_draft_tokens == 3 * 21
    assert max(map(len, said.values())) == 7
    sampled = ask(plain_engine(folder), prompts, temperature=1.0, max_tokens=60)
    before = counters.num_draft_tokens, counters.num_accepted_tokens
    assert ask(engine, prompts, temperature=1.0, max_tokens=60) == sampled
    tried, kept = counters.num_draft_tokens - before[0], counters.num_accepted_tokens - before[1]
    assert 5 < kept < tried
    engine.close()


def test_up_to_the_last_position(tmp_path: Path) -> None:
    """A block may lie behind the longest sequence, and where its positions end, nothing is proposed."""
    folder, own = write_cycle(tmp_path)
    prompts = {"0": [i % CYCLE for i in range(40)]}
    for length in (64, 128):  # the drafter has 128 positions
        plain = ask(plain_engine(folder, max_model_len=length), prompts, max_tokens=length - 40)
        engine, _, said = new_engine(folder, speculation=f"dflash:{own}", max_model_len=length)
        assert ask(engine, prompts, max_tokens=length - 40) == plain
        assert engine.speculator is not None
        counters = engine.speculator.counters
        assert counters.num_accepted_tokens == counters.num_draft_tokens > 15
        assert max(count for (_, count), ids in said.items() if ids) >= length - 40 - 10
        engine.close()


def test_lost_pairs_cost_nothing_but_proposals(tmp_path: Path) -> None:
    """Too few pages, steps that came by unread, pages of the prefix that are gone, preemption by both ways."""
    folder, own = write_cycle(tmp_path)
    prompts = {str(first): [(first + i) % CYCLE for i in range(40 + 5 * first)] for first in range(5)}
    plain = ask(plain_engine(folder), prompts, temperature=0.7)
    for settings in ({}, {"num_blocks": 9, "preemption": "swap", "swap_space_bytes": 1 << 22}, {"num_blocks": 9}):
        engine, drafter, _ = new_engine(folder, speculation=f"dflash:{own}", max_model_len=128, **settings)
        drafter.follow = TwiceOfThree(drafter.follow)  # type: ignore[method-assign]
        assert ask(engine, prompts, temperature=0.7) == plain
        drafter.pool.drop_prefixes()
        assert ask(engine, prompts, temperature=0.7) == plain
        drafter.pool.check_invariants([])
        assert engine.speculator is not None
        assert engine.speculator.is_on
        assert engine.speculator.counters.num_accepted_tokens > 20
        engine.close()


def test_a_drafter_that_fails_costs_nothing_but_proposals(tmp_path: Path) -> None:
    folder, own = write_cycle(tmp_path)
    prompts = {"0": [i % CYCLE for i in range(40)]}
    engine, drafter, _ = new_engine(folder, speculation=f"dflash:{own}")

    def fail(chunks: PairChunks, sampling_sequences: list[Drawing]) -> list[list[int]]:
        raise RuntimeError("no")

    drafter._drafting.draft = fail  # type: ignore[method-assign]
    assert ask(engine, prompts) == ask(plain_engine(folder), prompts)
    assert engine.speculator is not None
    assert not engine.speculator.is_on
    engine.close()


@pytest.mark.emulator
@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_on_an_emulated_gpu(arch: str, tmp_path: Path) -> None:
    folder, own = write_cycle(tmp_path)
    prompts = {str(first): [(first + i) % CYCLE for i in range(40 + 5 * first)] for first in range(2)}
    settings: dict[str, Any] = {"device": f"emulated:{arch}", "exact": True, "max_model_len": 96, "num_blocks": 32}
    plain = build_engine(folder, dtype="float32", speculation="off", seed=0, **settings)
    wanted = [ask(plain, prompts, max_tokens=20, temperature=each) for each in (0.0, 1.0)]
    engine, _, _ = new_engine(folder, speculation=f"dflash:{own}", **settings)
    assert engine.speculator is not None
    counters = engine.speculator.counters
    assert ask(engine, prompts, max_tokens=20) == wanted[0]
    assert counters.num_accepted_tokens == counters.num_draft_tokens > 20
    assert ask(engine, prompts, max_tokens=20, temperature=1.0) == wanted[1]
    assert engine.speculator.is_on
    engine.close()


def test_its_pages_and_weights_are_counted(tmp_path: Path) -> None:
    folder, own = write_target(tmp_path / "model"), write_drafter(tmp_path / "drafter", "dspark")
    settings: dict[str, Any] = {"max_model_len": 96, "device": "cpu", "kv_cache_bytes": 1 << 20}
    alone = describe_engine(folder, EngineConfig(**settings))
    both = describe_engine(folder, EngineConfig(**settings, speculation=f"dflash:{own}"))
    assert both.num_blocks == alone.num_blocks * 4 // 6  # two layers beside four
    engine = build_engine(folder, **settings, speculation=f"dflash:{own}")
    assert engine.info.num_blocks == both.num_blocks
    assert engine.info.weight_bytes == both.weight_bytes > alone.weight_bytes
    engine.close()


def test_what_does_not_go_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="split over 2 ranks"):
        EngineConfig(speculation="dflash:x", tensor_parallel_size=2)
    with pytest.raises(RequestError, match=r"dflash: .*need a folder"):
        EngineConfig(speculation="dflash:")
    with pytest.raises(RequestError, match=r"must be one of .*dflash:FOLDER, .*got 'dflash'"):
        EngineConfig(speculation="dflash")
    own, gpt2 = write_drafter(tmp_path / "drafter", "dflash"), write_model(tmp_path, load_golden("gpt2_gelu_new"))
    with pytest.raises(ModelLoadError, match="gives no hidden states of its layers"):
        build_engine(gpt2, device="cpu", speculation=f"dflash:{own}")
