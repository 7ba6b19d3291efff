"""Queued work runs late, in any order that its queues and waits allow, and in no other."""

from __future__ import annotations

import pytest

from runtime.emulator.driver.work_queues import MAX_QUEUED, Queue, Scheduler, Work


class Note:
    """An operation that writes its name down, or fails."""

    def __init__(self, log: list[str], name: str, *, fails: bool = False) -> None:
        self.log, self.label, self.fails = log, name, fails

    def run(self, work: Work) -> None:
        self.log.append(self.label)
        if self.fails:
            raise RuntimeError(self.label)


def scheduler(seed: int = 0) -> tuple[Scheduler, list[tuple[Work, Exception]]]:
    failures: list[tuple[Work, Exception]] = []
    return Scheduler(seed, lambda work, failure: failures.append((work, failure))), failures


def test_nothing_runs_before_somebody_waits() -> None:
    log: list[str] = []
    schedule, _ = scheduler()
    queue = Queue("owner")
    work = schedule.submit(queue, Note(log, "a"))
    assert log == []
    assert not work.is_done
    schedule.finish([work])
    assert log == ["a"]
    assert work.is_done
    assert work.ended_s > 0


def test_a_queue_keeps_its_order_and_finish_stops_at_its_target() -> None:
    log: list[str] = []
    schedule, _ = scheduler()
    queue = Queue("owner")
    works = [schedule.submit(queue, Note(log, name)) for name in "abcd"]
    schedule.finish([works[1]])
    assert log == ["a", "b"]


def test_orders_of_two_queues_differ_by_seed_and_keep_the_waits() -> None:
    seen = set()
    for seed in range(40):
        log: list[str] = []
        schedule, _ = scheduler(seed)
        first, second = Queue("owner"), Queue("owner")
        schedule.submit(first, Note(log, "a"))
        before = schedule.submit(first, Note(log, "b"))
        schedule.submit(second, Note(log, "x"))
        last = schedule.submit(second, Note(log, "y"), (before,))
        schedule.finish([last])
        assert log.index("a") < log.index("b") < log.index("y")
        assert log.index("x") < log.index("y")
        seen.add("".join(log))
    assert seen == {"abxy", "axby", "xaby"}


def test_work_of_another_queue_may_be_left_behind() -> None:
    left = 0
    for seed in range(40):
        log: list[str] = []
        schedule, _ = scheduler(seed)
        schedule.submit(Queue("owner"), Note(log, "other"))
        schedule.finish([schedule.submit(Queue("owner"), Note(log, "mine"))])
        left += "other" not in log
    assert 5 < left < 35


def test_progress_runs_something_and_comes_to_an_end() -> None:
    log: list[str] = []
    schedule, _ = scheduler(3)
    queue = Queue("owner")
    for number in range(20):
        schedule.submit(queue, Note(log, str(number)))
    for _ in range(20):
        before = len(log)
        schedule.progress()
        assert len(log) > before or len(log) == 20
    assert len(log) == 20


def test_a_long_queue_runs_down_by_itself() -> None:
    log: list[str] = []
    schedule, _ = scheduler()
    queue = Queue("owner")
    for number in range(MAX_QUEUED + 1):
        schedule.submit(queue, Note(log, str(number)))
    assert len(log) == MAX_QUEUED // 2 + 1
    assert log[:3] == ["0", "1", "2"]


@pytest.mark.parametrize("drops", [False, True])
def test_a_failure_is_handed_on_and_others_run(drops: bool) -> None:
    log: list[str] = []
    failures: list[Exception] = []

    def note_failure(work: Work, failure: Exception) -> None:
        failures.append(failure)
        if drops:
            schedule.drop(work.queue.owner)

    schedule = Scheduler(0, note_failure)
    queue, other = Queue("owner"), Queue("neighbour")
    schedule.submit(queue, Note(log, "bad", fails=True))
    last = schedule.submit(queue, Note(log, "after"))
    waiting = schedule.submit(other, Note(log, "other"), (last,))
    schedule.finish([waiting])
    assert [str(failure) for failure in failures] == ["bad"]
    assert last.is_done
    assert log == (["bad", "other"] if drops else ["bad", "after", "other"])


def test_finish_all_of_one_owner() -> None:
    log: list[str] = []
    schedule, _ = scheduler()
    for owner in ("a", "b"):
        for _ in range(3):
            schedule.submit(Queue(owner), Note(log, owner))
    schedule.finish_all("a")
    assert log.count("a") == 3
    schedule.finish_all()
    assert log.count("b") == 3
