"""Requests of all lengths at once: throughput, kinds of steps, and the cost of an eager pass."""

from __future__ import annotations

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.bench.scheduling.engines import local
from runtime.device.context import Event
from runtime.device.gpu import Gpu
from runtime.engine.engine import Engine
from runtime.engine.messages import EngineRequest
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.steps.step_input import StepInput
from tools.gpu.sections import Case, Options, Result
from tools.gpu.serving.asking import ask
from tools.gpu.serving.models import Model, config_of, quartiles_ms

NUM_REQUESTS = 64
PROMPTS, OUTPUTS = (100, 2000), (50, 200)
"""The least and the most tokens."""
PASSES = (256, 1024, 2048)
NUM_PASSES = 5


def cases(options: Options, name: str) -> Iterator[Case]:
    model = Model(options, name, max_num_seqs=2 if options.is_quick else NUM_REQUESTS)
    for number, which in enumerate(("first", "second", "third")):
        yield Case(f"{which} load", functools.partial(_load, model, number))
    for length in (20,) if options.is_quick else PASSES:
        yield Case(f"passes of {length}", functools.partial(_passes, model, length))
    model.close()


@dataclass(frozen=True, slots=True)
class Noted:
    """The execution of a step.

    Attributes:
        kind: "decode graph", "recorded forward" (replayed), "recording" or "eager".
        launch_s: until the host had launched it.
        begin, end: around it on the device, if timed.
    """

    kind: str
    launch_s: float
    begin: Event | None
    end: Event | None

    def span_ms(self) -> float:
        """Milliseconds on the device, from its first work to its last, without sampling unless that is recorded."""
        assert self.begin is not None, "it was timed"
        assert self.end is not None, "it was timed"
        self.end.synchronize()
        return self.end.elapsed_ms(self.begin)


class Probe:
    """Looks at an engine's steps as they are launched.

    Attributes:
        steps: by number.
        recorded: seconds of recordings of decode graphs, beside the steps.
    """

    def __init__(self, engine: Engine, *, is_timed: bool = False) -> None:
        """`is_timed`: events on the device around each step."""
        executor = local(engine)
        assert executor.graphs is not None, "a GPU has decode graphs"
        self.steps: dict[int, Noted] = {}
        self.recorded: list[float] = []
        self._executor, self._graphs, self._forwards = executor, executor.graphs, executor.graphs.forwards
        self._gpu = Gpu.of(executor.model.device) if is_timed else None
        self._start, self._record, self._make = executor.start, executor.record, vars(type(self._forwards))["_record"]
        self._num_made = 0
        vars(executor).update(start=self._started, record=self._recording)
        vars(self._forwards)["_record"] = self._making

    def close(self) -> None:
        for name in ("start", "record"):
            del vars(self._executor)[name]
        del vars(self._forwards)["_record"]

    def _counts(self) -> tuple[int, int, int]:
        return self._graphs.num_steps, self._num_made, self._forwards.num_steps

    def _event(self) -> Event | None:
        return None if self._gpu is None else self._gpu.stream.record(is_timed=True)

    def _started(self, step: StepInput, *more: Any) -> Any:
        before, begin = self._counts(), self._event()
        start = time.perf_counter()
        computation = self._start(step, *more)
        launch_s = time.perf_counter() - start
        grown = [now > then for now, then in zip(self._counts(), before)]
        kinds = ("decode graph", "recording", "recorded forward", "eager")
        self.steps[step.number] = Noted(kinds[[*grown, True].index(True)], launch_s, begin, self._event())
        return computation

    def _recording(self) -> None:
        had, start = len(self._graphs.recordings.kept), time.perf_counter()
        self._record()
        if len(self._graphs.recordings.kept) > had:
            self.recorded.append(time.perf_counter() - start)

    def _making(self, *arguments: Any) -> Any:
        self._num_made += 1
        return self._make(self._forwards, *arguments)


def _load(model: Model, seed: int) -> Result:
    """64 requests at once, of other lengths each time; the decode graphs stay."""
    rng, is_quick = np.random.default_rng(seed), model.options.is_quick
    count = 3 if is_quick else NUM_REQUESTS
    prompt_lens = rng.integers(*((4, 9) if is_quick else PROMPTS), count, endpoint=True)
    output_lens = rng.integers(*((2, 4) if is_quick else OUTPUTS), count, endpoint=True)
    requests = [
        EngineRequest(
            request_id=str(number), prompt_token_ids=rng.integers(0, model.engine.info.vocab_size, length).tolist(),
            params=SamplingParams(temperature=0.0, max_tokens=int(most), ignore_eos=True, detokenize=False),
        )
        for number, (length, most) in enumerate(zip(prompt_lens, output_lens))
    ]  # fmt: skip
    client, timeline = model.client, model.engine.timeline
    before = timeline[-1].number if timeline else -1
    probe = Probe(model.engine)
    start = time.perf_counter()
    try:
        answers = ask(client, requests)
    finally:
        probe.close()
    seconds = time.perf_counter() - start
    if [len(answer) for answer in answers] != output_lens.tolist():
        raise AssertionError("an answer has another length than was asked for")
    num_prompt, num_output = int(prompt_lens.sum()), int(output_lens.sum())
    kinds: dict[str, list[Any]] = defaultdict(list)
    for step in list(timeline):
        if step.number > before and step.number in probe.steps:
            kinds[probe.steps[step.number].kind].append(step)
    return {
        "layers": config_of(model.options, model.name)["num_hidden_layers"], "requests": count,
        "prompt_tokens": num_prompt, "output_tokens": num_output, "seconds": round(seconds, 3),
        "output_tokens_per_s": round(num_output / seconds, 1),
        "tokens_per_s": round((num_prompt + num_output) / seconds, 1),
        "decode_graphs_recorded": len(probe.recorded), "recorded_s": round(sum(probe.recorded), 3),
        "steps": {kind: _row(steps, probe) for kind, steps in sorted(kinds.items())},
    }  # fmt: skip


def _row(steps: list[Any], probe: Probe) -> Result:
    tokens = [step.num_tokens for step in steps]
    times = [step.end_s - step.start_s for step in steps]
    return {
        "steps": len(steps), "ms": quartiles_ms(times), "seconds": round(sum(times), 3),
        "host_ms": quartiles_ms([step.host_s for step in steps]),
        "launch_ms": quartiles_ms([probe.steps[step.number].launch_s for step in steps]),
        "tokens": sum(tokens), "tokens_median": statistics.median(tokens),
        "sequences_median": statistics.median(len(step.chunks) for step in steps),
    }  # fmt: skip


def _passes(model: Model, length: int) -> Result:
    """Single prompts, each of a new length, three times: eager, recorded, and replayed. The replay's device time is the
    pass's own."""
    found: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    timeline = model.engine.timeline
    for less in range(1 if model.options.is_quick else NUM_PASSES):
        prompts = model.prompts(1, length - less)
        for _ in range(3):
            probe = Probe(model.engine, is_timed=True)
            try:
                model.run(prompts, 1)
            finally:
                probe.close()
            if len(probe.steps) != 1:
                raise AssertionError(f"a prompt of {length - less} tokens took {len(probe.steps)} steps")
            (number, noted), last = *probe.steps.items(), timeline[-1]
            assert last.number == number, "the step is the latest"
            found[noted.kind].append((noted.launch_s, noted.span_ms() / 1e3, last.end_s - last.start_s))
    names = ("launch_ms", "device_ms", "step_ms")
    kinds = {
        kind: {"passes": len(rows)} | {name: quartiles_ms(list(each)) for name, each in zip(names, zip(*rows))}
        for kind, rows in found.items()
    }
    if "eager" not in kinds or "recorded forward" not in kinds:
        raise AssertionError(f"passes of fresh lengths were {', '.join(kinds)}")
    return {"layers": config_of(model.options, model.name)["num_hidden_layers"], "tokens": length} | kinds
