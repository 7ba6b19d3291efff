"""Models come when they are asked for, and go when nobody asks, or when another needs their room: no request is lost,
and one that cannot be answered is told why."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from server.config import ServerConfigError
from server.hosting.places import HOST
from server.hosting.pool import ModelPool
from tests.server.hosting.hosts import ENCODER, Fake, Served, hosting
from tests.waiting import wait_until


def at_once(served: Served, *models: str, threads: ThreadPoolExecutor, **more: Any) -> list[Future[httpx.Response]]:
    return [threads.submit(served.chat, model, **more) for model in models]


@pytest.fixture(name="threads")
def _threads() -> Any:
    with ThreadPoolExecutor(64) as found:
        yield found


def test_a_model_is_loaded_once_for_all_who_wait(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    with hosting(tmp_path, [slow := Fake("slow"), Fake("other")]) as served:
        slow.gate.clear()
        answers = at_once(served, *["slow"] * 20, threads=threads)
        wait_until(lambda: len(served.model("slow").waiting) == 20)
        assert served.status("slow") == "loading"
        assert served.says("other") == "other"  # nobody else waits for it
        slow.gate.set()
        assert Counter(each.result().status_code for each in answers) == {200: 20}
        assert slow.num_starts == 1
        wait_until(lambda: served.model("slow").num_open == 0)


def test_those_of_the_start_are_loaded_in_their_order_as_far_as_they_fit(tmp_path: Path) -> None:
    start = {"at_start": True}
    fakes = [Fake("a", 60, settings=start), Fake("b", 60, settings=start), Fake("c", 30, settings=start), Fake("d")]
    fakes[0].gate.clear()
    with hosting(tmp_path, fakes) as served:
        assert served.http.get("/ready").json() == {"ready": False, "state": "starting"}
        assert served.http.get("/ping").status_code == 503
        assert served.http.get("/health").json()["models"]["a"] == "loading"
        fakes[0].gate.set()
        wait_until(lambda: served.http.get("/ready").status_code == 200)
        assert served.http.get("/health").json()["models"] == {
            "a": "loaded", "b": "unloaded", "c": "loaded", "d": "unloaded",
        }  # fmt: skip
        assert served.http.get("/ping").status_code == 200


def test_the_least_recently_used_goes(tmp_path: Path) -> None:
    with hosting(tmp_path, [Fake(name, 40) for name in "abc"]) as served:
        for name in ("a", "b", "a", "c"):
            assert served.says(name) == name
        assert [served.status(name) for name in "abc"] == ["loaded", "unloaded", "loaded"]
        assert served.says("b") == "b"  # the same engine, started again
        assert [served.status(name) for name in "abc"] == ["unloaded", "loaded", "loaded"]
        assert served.fakes["b"].num_starts == 1
        text = served.http.get("/metrics").text
        assert 'xserv:model_evictions_total{model_name="a"} 1.0' in text
        assert 'xserv:model_loads_total{model_name="b"} 2.0' in text
        assert 'xserv:model_memory_bytes{model_name="a"} 0.0' in text
        assert 'xserv:models_memory_bytes{device="cpu"} 100.0' in text
        assert 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="b"} 2.0' in text


def test_one_that_goes_sleeps_and_keeps_its_weights(tmp_path: Path) -> None:
    """The room is for the weights of all three and the caches of two; then for less."""
    with hosting(tmp_path, [Fake(name, 40, cache_bytes=20) for name in "abc"]) as served:
        for name in "abc":
            assert served.says(name) == name
        assert [served.status(name) for name in "abc"] == ["sleeping", "loaded", "loaded"]
        assert served.http.get("/server_info").json()["models"][0]["memory_bytes"] == 20
        assert [each["model"] for each in served.http.get("/api/ps").json()["models"]] == ["b:latest", "c:latest"]
        assert served.says("a") == "a"
        assert [served.status(name) for name in "abc"] == ["loaded", "sleeping", "loaded"]
        assert served.fakes["a"].engine.commands == ["Sleep", "WakeUp"]
        assert served.http.post("/models/unload", json={"model": "b"}).status_code == 200
        assert served.status("b") == "unloaded"
        assert served.says("b") == "b"
    fakes = [*(Fake(name, 40, cache_bytes=20) for name in "ab"), Fake("large", 90, cache_bytes=30)]
    with hosting(tmp_path, fakes) as served:
        for name in ("a", "b", "large"):
            assert served.says(name) == name
        assert [served.status(name) for name in ("a", "b", "large")] == ["unloaded", "unloaded", "loaded"]
        assert served.says("a") == "a"
        assert [served.status(name) for name in ("a", "b", "large")] == ["loaded", "unloaded", "sleeping"]


def test_a_gpus_weights_stay_on_the_host_once_they_slept(tmp_path: Path) -> None:
    with hosting(tmp_path, [Fake(name, 60, cache_bytes=20) for name in "ab"]) as served:
        a, b = served.model("a"), served.model("b")
        a.place = b.place = "cuda:0"
        served.host.pool.budgets = {HOST: 100, "cuda:0": 100}
        assert served.says("a") == "a"
        assert (a.held_bytes, a.holds(HOST)) == (60, 0)
        assert served.says("b") == "b"
        assert (a.status, a.held_bytes, a.holds(HOST), b.holds(HOST)) == ("sleeping", 0, 40, 0)
        assert served.says("a") == "a"
        assert (a.held_bytes, a.holds(HOST), b.held_bytes, b.holds(HOST)) == (60, 40, 0, 40)
        assert served.http.post("/models/unload", json={"model": "a"}).status_code == 200
        assert (a.held_bytes, a.holds(HOST)) == (0, 0)


def test_an_idle_one_sleeps_after_its_time_but_goes_if_that_is_none(tmp_path: Path) -> None:
    with hosting(tmp_path, [Fake("a", 40, cache_bytes=20, settings={"keep_alive_s": 0.1})]) as served:
        assert served.says("a") == "a"
        wait_until(lambda: served.status("a") == "sleeping")
        hello = {"messages": [{"role": "user", "content": "Hi"}], "stream": False, "keep_alive": 0}
        assert served.http.post("/api/chat", json={"model": "a", **hello}).status_code == 200
        wait_until(lambda: served.status("a") == "unloaded")
        assert served.says("a") == "a"


def test_one_that_cannot_sleep_or_wake_is_started_again(tmp_path: Path) -> None:
    with hosting(tmp_path, [Fake(name, 60, cache_bytes=20) for name in "ab"]) as served:
        assert served.says("a") == "a"
        served.fakes["a"].engine.is_sleepy = True
        assert served.says("b") == "b"
        assert served.status("a") == "sleeping"
        served.fakes["b"].engine.is_restless = True
        assert served.says("a") == "a"
        assert (served.status("a"), served.status("b")) == ("loaded", "unloaded")
        served.fakes["a"].engine.is_sleepy = False
        assert [served.says(name) for name in "bab"] == ["b", "a", "b"]


def test_as_many_awake_as_allowed(tmp_path: Path) -> None:
    with hosting(tmp_path, [Fake(name, 20, cache_bytes=10) for name in "abc"], models_max=1) as served:
        for name in "abca":
            assert served.says(name) == name
        assert [served.status(name) for name in "abc"] == ["loaded", "sleeping", "sleeping"]


def test_as_many_as_allowed(tmp_path: Path) -> None:
    with hosting(tmp_path, [Fake(name, 1) for name in "abc"], models_max=2) as served:
        for name in "abcab":
            assert served.says(name) == name
        assert [served.status(name) for name in "abc"] == ["loaded", "loaded", "unloaded"]


def test_a_priority_protects(tmp_path: Path) -> None:
    fakes = [Fake("high", 60, settings={"priority": 5}), Fake("low", 60), Fake("small", 40)]
    with hosting(tmp_path, fakes) as served:
        assert served.says("low") == "low"
        assert served.says("high") == "high"
        answer = served.chat("low")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_room_for_model")
        assert "'high' (60 bytes)" in answer.json()["error"]["message"]
        assert "priority" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"]
        assert served.says("small") == "small"
        assert [served.status(name) for name in ("high", "low", "small")] == ["loaded", "unloaded", "loaded"]


def test_one_that_never_fits_is_told(tmp_path: Path) -> None:
    with hosting(tmp_path, [Fake("huge", 101), Fake("small")]) as served:
        assert served.says("small") == "small"
        answer = served.chat("huge")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_does_not_fit")
        assert "101 bytes of 100 bytes" in answer.json()["error"]["message"]
        assert "retry-after" not in answer.headers
        assert served.status("small") == "loaded"


def test_one_that_needs_the_room_of_a_busy_one_waits_in_its_turn(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    with hosting(tmp_path, [busy := Fake("busy", 60), Fake("next", 60)]) as served:
        assert served.says("busy") == "busy"
        busy.engine.step_gate.clear()
        (first,) = at_once(served, "busy", threads=threads)
        wait_until(lambda: served.model("busy").num_open == 1)
        (waiting,) = at_once(served, "next", threads=threads)
        wait_until(lambda: served.model("busy").is_leaving)
        later = at_once(served, *["busy"] * 3, threads=threads)  # they come after it, and wait behind it
        wait_until(lambda: len(served.model("busy").waiting) == 3)
        assert not waiting.done()
        busy.engine.step_gate.set()
        answers = [each.result() for each in (first, waiting, *later)]
        assert [each.status_code for each in answers] == [200] * 5
        assert [each.json()["model"] for each in answers] == ["busy", "next", "busy", "busy", "busy"]


@pytest.mark.parametrize("wait_s", [0.0, 0.2])
def test_one_that_may_not_wait_is_told_who_would_have_to_go(
    tmp_path: Path, threads: ThreadPoolExecutor, wait_s: float
) -> None:
    with hosting(tmp_path, [busy := Fake("busy", 60), Fake("next", 60)], model_wait_s=wait_s) as served:
        assert served.says("busy") == "busy"
        busy.engine.step_gate.clear()
        (first,) = at_once(served, "busy", threads=threads)
        wait_until(lambda: served.model("busy").num_open == 1)
        answer = served.chat("next")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_room_for_model")
        assert "'busy' (60 bytes)" in answer.json()["error"]["message"]
        assert "are answering" in answer.json()["error"]["message"]
        (second,) = at_once(served, "busy", threads=threads)  # it did not have to go
        busy.engine.step_gate.set()
        assert [first.result().status_code, second.result().status_code] == [200, 200]
        assert served.says("next") == "next"


def test_a_sleeping_one_neither_goes_nor_is_named_where_too_many_are_awake(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    fakes = [Fake("asleep", 20, cache_bytes=10), busy := Fake("busy", 20), Fake("next", 20)]
    with hosting(tmp_path, fakes, models_max=1, model_wait_s=0.2) as served:
        assert [served.says(name) for name in ("asleep", "busy")] == ["asleep", "busy"]
        busy.engine.step_gate.clear()
        (first,) = at_once(served, "busy", threads=threads)
        wait_until(lambda: served.model("busy").num_open == 1)
        answer = served.chat("next")
        assert answer.json()["error"]["code"] == "no_room_for_model"
        assert answer.json()["error"]["message"].endswith(
            "(--models-max). These would have to go and are answering: 'busy' (20 bytes)."
        )
        assert served.status("asleep") == "sleeping"
        busy.engine.step_gate.set()
        assert first.result().status_code == 200


def test_no_model_goes_for_memory_of_another_device(tmp_path: Path) -> None:
    fakes = [Fake("beside", 40), Fake("first", 60), Fake("second", 60)]
    with hosting(tmp_path, fakes) as served:
        served.host.pool.budgets = {"cpu": 100, "cuda:0": 100}
        for name in ("first", "second"):
            served.model(name).place = "cuda:0"
        for name in ("beside", "first", "second"):
            assert served.says(name) == name
        assert served.status("beside") == "loaded"


def test_a_start_at_which_no_model_fits_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        pytest.raises(ServerConfigError, match=r"--models-memory .* 'less' needs 110 bytes of cpu, .* take 100 bytes"),
        hosting(tmp_path, [Fake("more", 120), Fake("less", 110)]),
    ):
        pass
    with hosting(tmp_path, [Fake("more", 120), Fake("fits", 10)]):
        assert "'more' needs 120 bytes" in caplog.text
        assert "'fits'" not in caplog.text


def test_an_idle_one_goes_after_its_time(tmp_path: Path) -> None:
    with hosting(tmp_path, [Fake("brief", settings={"keep_alive_s": 0.2}), Fake("long")]) as served:
        assert [served.says(name) for name in ("brief", "long")] == ["brief", "long"]
        wait_until(lambda: served.status("brief") == "unloaded")
        assert served.status("long") == "loaded"
        assert served.says("brief") == "brief"
        brief = served.fakes["brief"].engine
        brief.step_gate.clear()
        threading.Timer(0.6, brief.step_gate.set).start()
        assert served.says("brief") == "brief"  # it does not go while it answers


def test_ollamas_keep_alive(tmp_path: Path) -> None:
    with hosting(tmp_path, [Fake("a"), Fake("b", pooling=ENCODER)]) as served:
        http = served.http

        def expires() -> dict[str, str]:
            return {each["model"]: each["expires_at"] for each in http.get("/api/ps").json()["models"]}

        hello: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "stream": False}
        answer = http.post("/api/chat", json={"model": "a", **hello, "keep_alive": "5m"})
        assert (answer.status_code, answer.headers.get("x-xserv-ignored")) == (200, None)
        left_s = served.http.get("/server_info").json()["models"][0]["expires_in_s"]
        assert 200 < left_s <= 300
        assert expires()["a:latest"].startswith("20")
        http.post("/api/chat", json={"model": "a", **hello, "keep_alive": -1})
        assert expires() == {"a:latest": "9999-12-31T23:59:59Z"}
        http.post("/api/embed", json={"model": "b", "input": "x", "keep_alive": 3600})
        assert sorted(expires()) == ["a:latest", "b:latest"]
        http.post("/api/embed", json={"model": "b", "input": "x", "keep_alive": 0})
        wait_until(lambda: list(expires()) == ["a:latest"])
        answer = http.post("/api/generate", json={"model": "a", "keep_alive": 0, "stream": False})
        assert answer.json()["done_reason"] == "unload"
        assert expires() == {}
        answer = http.post("/api/generate", json={"model": "a:latest", "keep_alive": "1h"})
        assert answer.json()["done_reason"] == "load"
        assert list(expires()) == ["a:latest"]
        answer = http.post("/api/chat", json={"model": "a", **hello, "keep_alive": "soon"})
        assert answer.status_code == 400
        assert "keep_alive" in answer.json()["error"]


def test_llama_servers_load_and_unload(tmp_path: Path) -> None:
    with hosting(tmp_path, [Fake("a"), Fake("b")]) as served:
        assert served.http.post("/models/load", json={"model": "a"}).json() == {"success": True}
        listed = {each["id"]: each["status"] for each in served.http.get("/models").json()["data"]}
        assert listed == {"a": {"value": "loaded"}, "b": {"value": "unloaded"}}
        assert served.http.post("/models/unload", json={"model": "a"}).json() == {"success": True}
        assert served.http.post("/models/unload", json={"model": "a"}).json() == {"success": True}
        assert served.status("a") == "unloaded"
        assert served.says("a") == "a"


def test_a_broken_model_harms_no_other(tmp_path: Path) -> None:
    start = {"at_start": True}
    fakes = [Fake("broken", settings=start, broken="/secret/config.json: no such layer"), Fake("sound", settings=start)]
    with hosting(tmp_path, fakes) as served:
        wait_until(lambda: served.http.get("/ready").status_code == 200)
        assert served.says("sound") == "sound"
        starts = fakes[0].num_starts
        for _ in range(3):
            answer = served.chat("broken")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_not_loaded")
            assert "'broken'" in answer.json()["error"]["message"]
            assert "secret" not in answer.text
            assert int(answer.headers["retry-after"]) >= 1
        assert fakes[0].num_starts == starts  # it is not tried for every request
        listed = {each["id"]: each["status"] for each in served.http.get("/v1/models").json()["data"]}
        assert listed == {"broken": {"value": "unloaded", "failed": True}, "sound": {"value": "loaded"}}
        assert served.http.post("/models/load", json={"model": "broken"}).status_code == 503
        fakes[0].broken = ""
        assert served.http.post("/models/load", json={"model": "broken"}).status_code == 200
        assert served.says("broken") == "broken"
        assert 'xserv:model_failed_loads_total{model_name="broken"} 2.0' in served.http.get("/metrics").text


def test_a_dead_engine_is_its_models_matter(tmp_path: Path) -> None:
    with hosting(tmp_path, [Fake("a", 60), Fake("b", 30), Fake("c", 60)]) as served:
        assert [served.says(name) for name in "ab"] == ["a", "b"]
        served.fakes["a"].engine.die("starting")
        answer = served.chat("a")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
        assert served.status("a") == "loading"
        assert served.says("b") == "b"
        served.fakes["a"].engine.revive()
        assert served.says("a") == "a"
        served.fakes["a"].engine.die("starting")
        assert served.says("c") == "c"  # one that is being started again can go, too
        assert served.says("a") == "a"
        assert served.fakes["a"].num_starts == 2


def test_ready_tells_that_all_engines_are_dead(tmp_path: Path) -> None:
    with hosting(tmp_path, [Fake("a"), Fake("b"), Fake("c")]) as served:
        assert served.http.get("/ready").status_code == 200  # each is loaded on demand
        assert [served.says(name) for name in "ab"] == ["a", "b"]
        served.fakes["a"].engine.die("down")
        assert served.http.get("/ready").json() == {"ready": True, "state": "ready"}
        served.fakes["b"].engine.die("starting")
        answer = served.http.get("/ready")
        assert (answer.status_code, answer.json()) == (503, {"ready": False, "state": "starting"})
        assert answer.headers["retry-after"] == "1"
        served.fakes["b"].engine.die("down")
        assert served.http.get("/ready").json()["state"] == "down"
        served.fakes["b"].engine.revive()
        assert served.http.get("/ready").status_code == 200


def test_a_model_that_was_told_to_sleep_is_shown_so(tmp_path: Path) -> None:
    (keys := tmp_path / "keys").write_text("sk-admin\n")
    with hosting(tmp_path, [Fake("a"), Fake("b")], admin_key_files=(str(keys),)) as served:
        key = {"Authorization": "Bearer sk-admin"}
        assert [served.says(name) for name in "ab"] == ["a", "b"]

        def shown() -> list[str]:
            return [each["status"]["value"] for each in served.http.get("/models").json()["data"]]

        assert served.http.post("/sleep?model=a", headers=key).status_code == 200
        assert shown() == ["sleeping", "loaded"]
        assert served.status("a") == "sleeping"
        assert served.http.post("/wake_up?model=a", headers=key).status_code == 200
        assert shown() == ["loaded", "loaded"]
        served.http.post("/sleep?model=a", headers=key)
        assert served.http.post("/models/unload", json={"model": "a"}).status_code == 200
        assert served.says("a") == "a"  # another engine, which is awake
        assert shown() == ["loaded", "loaded"]


def test_a_client_that_leaves_holds_nothing(tmp_path: Path) -> None:
    with hosting(tmp_path, [slow := Fake("slow", settings={"keep_alive_s": 0.1}), Fake("other")]) as served:
        slow.gate.clear()
        with pytest.raises(httpx.ReadTimeout):
            served.http.post(
                "/v1/completions", json={"model": "slow", "prompt": "Hi"}, timeout=httpx.Timeout(5.0, read=0.2)
            )
        wait_until(lambda: not served.model("slow").waiting)
        slow.gate.set()
        wait_until(lambda: served.model("slow").num_loads == 1)
        wait_until(lambda: served.status("slow") == "unloaded")
        assert served.model("slow").num_open == 0
        assert served.says("other") == "other"


def test_thousands_of_requests_over_models_that_take_turns(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    """Room for two of five; every answer is that of the model that was asked, and none is lost."""
    names = "abcde"
    with hosting(tmp_path, [Fake(name, 45, settings={"keep_alive_s": 0.02}) for name in names]) as served:
        asked = [names[(7 * i + i // 11) % 5] for i in range(600)]
        answers = at_once(served, *asked, threads=threads)
        for name, answer in zip(asked, answers, strict=True):
            found = answer.result()
            assert found.status_code == 200, found.text
            assert found.json()["choices"][0]["message"]["content"] == name
        wait_until(lambda: not any(each.num_open or each.waiting for each in served.host.models))
        begun_s = time.monotonic()
        wait_until(lambda: all(served.status(name) == "unloaded" for name in names))
        assert time.monotonic() - begun_s < 60


@pytest.mark.parametrize("fails", [False, True])
def test_requests_that_leave_as_their_model_comes(fails: bool) -> None:
    """One that was cancelled, but not yet told so, takes nothing from the others that wait."""

    async def places_of_three() -> tuple[int, list[str]]:
        places: list[asyncio.Future[None]] = [asyncio.get_running_loop().create_future() for _ in range(3)]
        places[0].cancel()
        model: Any = SimpleNamespace(name="a", status="unloaded" if fails else "loaded", waiting=list(places),
                                     num_open=0, retry_s=time.monotonic() + 60, is_leaving=False)  # fmt: skip
        await ModelPool([], {})._bring(model)
        assert not model.waiting
        return model.num_open, ["left" if each.cancelled() else str(each.exception()) for each in places]

    told = "The model 'a' could not be loaded; the server's log says why." if fails else "None"
    assert asyncio.run(places_of_three()) == (0 if fails else 2, ["left", told, told])


def test_an_unload_waits_for_a_load(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    with hosting(tmp_path, [slow := Fake("slow")]) as served:
        slow.gate.clear()
        asked = threads.submit(served.chat, "slow")
        wait_until(lambda: served.status("slow") == "loading")
        unloaded = threads.submit(served.http.post, "/models/unload", json={"model": "slow"})
        time.sleep(0.1)
        assert not unloaded.done()
        slow.gate.set()
        assert asked.result().status_code == 200
        assert unloaded.result().json() == {"success": True}
        assert served.status("slow") == "unloaded"


def test_an_unload_waits_for_requests_that_have_not_reached_the_engine() -> None:
    """They hold the model already, as those do that waited for its loading; the drain's time bounds the wait."""

    async def num_open_at_the_unload(drain_s: float) -> tuple[int, float]:
        seen: list[tuple[int, float]] = []
        model: Any = SimpleNamespace(name="a", status="loaded", waiting=[], num_open=0, is_leaving=False, is_there=True,
                                     timer=None, is_idle=False, last_used_s=0.0)  # fmt: skip
        model.unload = lambda left_s: seen.append((model.num_open, left_s))
        pool = ModelPool([model], {}, drain_s=drain_s)
        async with pool.held(model):
            unloading = asyncio.create_task(pool.unload(model))
            while model.status != "unloading":
                await asyncio.sleep(0)
            if not drain_s:
                await unloading
        await unloading
        assert model.status == "unloaded"
        return seen[0]

    num_open, left_s = asyncio.run(num_open_at_the_unload(60.0))
    assert num_open == 0
    assert 0 < left_s <= 60
    assert asyncio.run(num_open_at_the_unload(0.0)) == (1, 0.0)
