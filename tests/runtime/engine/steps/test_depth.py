"""An executor that takes several steps at once, as one with pipeline stages does: the same tokens, ended in order."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest

from runtime.engine.engine import Engine
from runtime.engine.steps.executor import DrawMasks
from runtime.engine.steps.local_executor import LocalExecutor
from runtime.engine.steps.step_input import Sampled, StepInput, decode, encode
from tests.runtime.engine.fakes import Collected, make_engine, request, run_to_end


class DeepExecutor(LocalExecutor):
    """Keeps started steps, as they would lie before the stages, and runs each when its result is asked for."""

    depth = 3

    def begin(self) -> None:
        self.waiting: deque[bytes] = deque()
        self.most = 0

    def start(self, step: StepInput, masks: DrawMasks | None = None) -> Any:
        opened = [decode(each) for each in self.waiting]
        rows = {row for each in opened for row in each.rows[each.num_samples > 0].tolist()}
        fresh = {load.row for load in step.loads}
        assert not rows.intersection(set(step.rows.tolist()) - fresh), "a step is behind one that draws for its row"
        sent = encode(step)
        self.waiting.append(sent)
        self.most = max(self.most, len(self.waiting))
        begun = super().start

        class Later:
            started_s = 0.0

            @staticmethod
            def result() -> Sampled:
                assert self.waiting.popleft() is sent, "results are asked for in another order"
                return begun(decode(sent), masks).result()

        return Later


def serve(engine: Engine) -> dict[str, Collected]:
    rng = random.Random(9)
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 2}, {"n": 3}, {"frequency_penalty": 0.5}]
    for i in range(12):
        prompt = [rng.randrange(90) for _ in range(rng.randrange(1, 60))]
        engine.add(request(f"r{i}", prompt, max_tokens=rng.randrange(1, 30), **kinds[i % len(kinds)]))
    return run_to_end(engine)


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_blocks": 22}, {"num_blocks": 22, "swap_space_bytes": 1 << 12}, {"max_num_batched_tokens": 5}],
    ids=["room", "preemption", "swapping", "a small budget"],
)
def test_several_open_steps_change_no_token(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"overlap": "off", "swap_space_bytes": 0, **settings}
    plain = serve(make_engine(**settings))
    monkeypatch.setattr("tests.runtime.engine.fakes.LocalExecutor", DeepExecutor)
    engine = make_engine(**settings)
    executor = engine.executor
    assert isinstance(executor, DeepExecutor)
    executor.begin()
    deep = serve(engine)
    assert executor.most == 3
    for name, each in plain.items():
        for index in range(3):
            assert deep[name].token_ids(index) == each.token_ids(index), name
    if "num_blocks" in settings:
        assert engine.stats().num_preemptions > 0
