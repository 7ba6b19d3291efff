"""What a step costs the thread that drives several ranks beside one: a model that computes nothing, decodes of a batch.

    python -m tools.measuring.rank_step_cost --num-ranks 4

Every rank is a process with a hollow model (`runtime.bench.scheduling.overhead`), so that what is left is telling the
ranks of each step, drawing, and meeting them at its end. Engines of one rank and of several take turns of 100 steps in
one process, since a machine's speed changes from one second to the next; the first of a turn are not counted: by the
last of them the driver is as far before the ranks as it may be. Processor time is the driver's thread's; what a thread
spends in looking whether the others have come is in it, and is shown without that, too: without the meeting, whose
other ranks run behind. Processors that share a core, caches or a clock make a thread slower by being busy; so one rank
is timed alone, and beside as many engines of one rank as there are other ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.bench.scheduling.overhead import BLOCK_SIZE, VOCAB_SIZE, HollowModel, loaded_engine
from runtime.own_packages import python_module

if TYPE_CHECKING:
    from runtime.engine.config import EngineLimits
    from runtime.engine.engine import Engine
    from runtime.engine.steps.local_executor import LocalExecutor
    from runtime.kv.cache import KVCache

TURN_STEPS = 100
SETTLE_STEPS = 40
"""Of a turn, that are not counted: more than a driver may be before its ranks."""


class HollowRank(HollowModel):
    """A rank's part of nothing."""

    weight_bytes = 0


def local_executor(limits: EngineLimits, communicator: Any) -> LocalExecutor:
    """A rank's, over pages of its own."""
    from runtime.device.device import CPU
    from runtime.engine.steps.local_executor import LocalExecutor
    from runtime.kv.cache import KVCache

    model: Any = HollowRank(CPU)
    return LocalExecutor(model, KVCache(model.kv_cache_spec(BLOCK_SIZE), limits.num_blocks), limits, VOCAB_SIZE,
                         communicator)  # fmt: skip


def engine_on(num_ranks: int, num_seqs: int, num_steps: int, *, meets: bool) -> Engine:
    """All of whose requests decode; without `meets` the driver goes on without waiting for the others."""
    if num_ranks == 1:
        return loaded_engine(num_seqs, BLOCK_SIZE, num_steps, 0, "cpu")

    def executor_of(model: HollowModel, kv_cache: KVCache, limits: EngineLimits) -> Any:
        from runtime.engine.config import EngineConfig
        from runtime.engine.ranks import group
        from runtime.engine.ranks.executor import ParallelExecutor

        config = EngineConfig(device="cpu", tensor_parallel_size=num_ranks, overlap="off", decode_graphs="off")
        group.COMMAND = (*python_module("tools.measuring.rank_step_cost"), *([] if meets else ["--alone"]))  # type: ignore[assignment]
        ranks = group.RankGroup(Path(), config)
        ranks.wait_loaded()
        ranks.allocate(limits, VOCAB_SIZE)
        if not meets:
            ranks.communicator.end_step = lambda number: None  # type: ignore[method-assign]
        return ParallelExecutor(local_executor(limits, ranks.communicator), ranks)

    return loaded_engine(num_seqs, BLOCK_SIZE, num_steps, 0, "cpu", executor_of)


def turn_ms(engine: Engine, num_threads: int, num_seqs: int) -> list[float]:
    """Of each step of a turn but the first ones."""
    from numba_kernels.cpu.running import pool

    times = []
    pool.limit_threads(num_threads)
    for _ in range(TURN_STEPS):
        begun = time.thread_time()
        engine.step()
        times.append(1e3 * (time.thread_time() - begun))
        assert engine.timeline[-1].num_tokens == num_seqs, "a step decoded other than all"
    return times[SETTLE_STEPS:]


class Neighbours:
    """Processes that run engines of one rank, when they are let."""

    def __init__(self, count: int, num_seqs: int) -> None:
        module = python_module("tools.measuring.rank_step_cost")
        command = [sys.executable, *module, "--busy", "--num-seqs", str(num_seqs)]
        environment = {**os.environ, "NUMBA_NUM_THREADS": "1"}
        self._processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) for _ in range(count)]
        for each in self._processes:
            assert each.stdout is not None
            each.stdout.readline()  # it runs
        self.stop()

    def run(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        for each in self._processes:
            each.communicate()

    def _signal(self, number: signal.Signals) -> None:
        for each in self._processes:
            each.send_signal(number)


def round_ms(num_ranks: int, num_seqs: int, num_turns: int) -> dict[str, float]:
    """The mean step of each layout, all of which run in turns: the driver waits for the others in some of them."""
    from numba_kernels.cpu.running import pool  # not where a rank is, before its number of threads is settled

    num_steps = num_turns * TURN_STEPS
    few = max(1, pool.NUM_THREADS // num_ranks)  # as the group shares them out
    with contextlib.ExitStack() as stack:

        def opened(ranks: int, *, meets: bool, num_steps: int) -> Engine:
            engine = engine_on(ranks, num_seqs, num_steps, meets=meets)
            stack.callback(engine.close)
            while not engine.timeline or engine.timeline[-1].num_tokens != num_seqs:
                engine.step()  # prompts
            return engine

        one = opened(1, meets=True, num_steps=2 * num_steps)
        meeting = opened(num_ranks, meets=True, num_steps=num_steps)
        not_meeting = opened(num_ranks, meets=False, num_steps=num_steps)
        neighbours = Neighbours(num_ranks - 1, num_seqs)
        stack.callback(neighbours.close)
        layouts = {
            "one": (one, pool.NUM_THREADS), "one_beside": (one, pool.NUM_THREADS), "meeting": (meeting, few),
            "not_meeting": (not_meeting, few),
        }  # fmt: skip
        times: dict[str, list[float]] = {name: [] for name in layouts}
        for turn in range(num_turns):
            for name in sorted(layouts, reverse=bool(turn % 2)):
                if name == "one_beside":
                    neighbours.run()
                times[name] += turn_ms(*layouts[name], num_seqs)
                neighbours.stop()
    return {name: statistics.mean(each) for name, each in times.items()}


def be_busy(num_seqs: int) -> None:
    """Run steps until the process is killed."""
    while True:
        engine = loaded_engine(num_seqs, BLOCK_SIZE, 2000, 0, "cpu")
        engine.step()
        print(flush=True)
        while engine.has_work:
            engine.step()


def rank_main() -> None:
    """In a rank's process."""
    from runtime.engine.ranks import main

    is_alone = "--alone" in sys.argv
    sys.argv = [each for each in sys.argv if each != "--alone"]

    def executor_over(
        model: Any, folder: Any, config: Any, limits: EngineLimits, vocab_size: int, communicator: Any
    ) -> LocalExecutor:
        if is_alone:
            communicator.end_step = lambda number: None
        return local_executor(limits, communicator)

    settle = main._settle

    def settle_and_hollow(load: Any) -> None:
        settle(load)
        from runtime.device.device import CPU  # once the number of threads is settled
        from runtime.engine import make_engine

        make_engine.loaded_model = lambda *arguments, **keywords: HollowRank(CPU)  # type: ignore[assignment]
        make_engine.executor_over = executor_over  # type: ignore[assignment]

    main._settle = settle_and_hollow
    main.main()


def report(num_ranks: int, num_seqs: int, num_turns: int, num_rounds: int) -> dict[str, Any]:
    """Milliseconds of the driver's thread a step, by round and as medians."""
    rounds = [round_ms(num_ranks, num_seqs, num_turns) for _ in range(num_rounds)]
    more_ms = {
        f"{name} over {base}": statistics.median(each[name] - each[base] for each in rounds)
        for base in ("one", "one_beside")
        for name in ("meeting", "not_meeting")
    }
    return {"num_ranks": num_ranks, "num_seqs": num_seqs, "num_turns": num_turns, "rounds": rounds, "more_ms": more_ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-ranks", type=int, default=4)
    parser.add_argument("--num-seqs", type=int, default=32)
    parser.add_argument("--num-turns", type=int, default=8, help=f"of {TURN_STEPS} steps, of each layout in a round")
    parser.add_argument("--num-rounds", type=int, default=3, help="each with new processes")
    parser.add_argument("--busy", action="store_true", help="be one rank until killed; for the tool's own use")
    given = parser.parse_args()
    if given.num_ranks < 2:
        parser.error(f"--num-ranks is {given.num_ranks}, must be at least 2")
    if given.busy:
        be_busy(given.num_seqs)
    found = report(given.num_ranks, given.num_seqs, given.num_turns, given.num_rounds)
    for each in found["rounds"]:
        print("  ".join(f"{name} {value:.3f} ms" for name, value in each.items()))
    print("more than one rank: " + ", ".join(f"{value:.3f} ms {name}" for name, value in found["more_ms"].items()))


if __name__ == "__main__":
    rank_main() if "--fd" in sys.argv else main()
