"""What a step costs the thread that drives several ranks beside one: a model that computes nothing, decodes of a batch.

    python -m tools.measuring.rank_step_cost --num-ranks 4

Every rank is a process with a hollow model (`runtime.bench.scheduling.overhead`), so that what is left is telling the
ranks of each step, drawing, and meeting them at its end. Engines of one rank and of several take turns. Processor
time is the driver's thread's; what a thread spends in looking whether the others have come is in it, which on fewer
processors than ranks is most of it, and is shown without that, too: without the meeting, whose other ranks run
behind. Processors that share a core, caches or a clock make a thread slower by being busy; so one rank is timed
alone, and beside as many engines of one rank as there are other ranks.
"""

from __future__ import annotations

import argparse
import os
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
        ranks = group.RankGroup(Path(), config)
        ranks.wait_loaded()
        ranks.allocate(limits, VOCAB_SIZE)
        if not meets:
            ranks.communicator.end_step = lambda number: None  # type: ignore[method-assign]
        return ParallelExecutor(local_executor(limits, ranks.communicator), ranks)

    return loaded_engine(num_seqs, BLOCK_SIZE, num_steps, 0, "cpu", executor_of)


def step_ms(num_ranks: int, num_seqs: int, num_steps: int, *, meets: bool = True) -> float:
    """The mean over the last `num_steps` steps that decode all: the driver waits for the others in some of them."""
    engine, times = engine_on(num_ranks, num_seqs, num_steps, meets=meets), []
    try:
        while engine.has_work:
            begun = time.thread_time()
            engine.step()
            spent = time.thread_time() - begun
            if engine.timeline[-1].num_tokens == num_seqs:
                times.append(1e3 * spent)
    finally:
        engine.close()
    assert len(times) >= num_steps, f"{len(times)} of {num_steps} steps decoded all"
    return statistics.mean(times[-num_steps:])


def step_beside_ms(num_others: int, num_seqs: int, num_steps: int) -> float:
    """One rank's, while other processes run engines of their own."""
    command = [sys.executable, *python_module("tools.measuring.rank_step_cost"), "--busy", "--num-seqs", str(num_seqs)]
    others = [
        subprocess.Popen(command, env={**os.environ, "NUMBA_NUM_THREADS": "1"}, stdout=subprocess.PIPE)
        for _ in range(num_others)
    ]
    try:
        for other in others:
            assert other.stdout is not None
            other.stdout.readline()  # it runs
        return step_ms(1, num_seqs, num_steps)
    finally:
        for other in others:
            other.kill()
            other.communicate()


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


def report(num_ranks: int, num_seqs: int, num_steps: int, num_rounds: int) -> dict[str, Any]:
    """Milliseconds of the driver's thread a step, by round and as medians."""
    from runtime.engine.ranks import group

    rounds: list[dict[str, float]] = []
    for _ in range(num_rounds):
        found = {"one": step_ms(1, num_seqs, num_steps)}
        found["one_beside"] = step_beside_ms(num_ranks - 1, num_seqs, num_steps)
        for name, more in (("meeting", []), ("not_meeting", ["--alone"])):
            group.COMMAND = (*python_module("tools.measuring.rank_step_cost"), *more)  # type: ignore[assignment]
            found[name] = step_ms(num_ranks, num_seqs, num_steps, meets=not more)
        rounds.append(found)
    more_ms = {
        f"{name} over {base}": statistics.median(each[name] - each[base] for each in rounds)
        for base in ("one", "one_beside")
        for name in ("meeting", "not_meeting")
    }
    return {"num_ranks": num_ranks, "num_seqs": num_seqs, "num_steps": num_steps, "rounds": rounds, "more_ms": more_ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-ranks", type=int, default=4)
    parser.add_argument("--num-seqs", type=int, default=32)
    parser.add_argument("--num-steps", type=int, default=400)
    parser.add_argument("--num-rounds", type=int, default=5)
    parser.add_argument("--busy", action="store_true", help="be one rank until killed; for the tool's own use")
    given = parser.parse_args()
    if given.num_ranks < 2:
        parser.error(f"--num-ranks is {given.num_ranks}, must be at least 2")
    if given.busy:
        be_busy(given.num_seqs)
    found = report(given.num_ranks, given.num_seqs, given.num_steps, given.num_rounds)
    for each in found["rounds"]:
        print("  ".join(f"{name} {value:.3f} ms" for name, value in each.items()))
    print("more than one rank: " + ", ".join(f"{value:.3f} ms {name}" for name, value in found["more_ms"].items()))


if __name__ == "__main__":
    rank_main() if "--fd" in sys.argv else main()
