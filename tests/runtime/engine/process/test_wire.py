"""Messages and frames between a server and its engine process, and the errors that cross."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.errors import HubOfflineError, WeightsError
from runtime.device.errors import DeviceOutOfMemoryError, LaunchError
from runtime.engine.config import EngineConfig
from runtime.engine.errors import ContextLengthExceededError, EngineDeadError, QueueFullError, RequestError
from runtime.engine.messages import (
    ChunkView,
    EngineOutput,
    EngineRequest,
    ImageItem,
    PoolingRequest,
    RequestTimes,
    StepView,
    TokenLogprobs,
)
from runtime.engine.process.wire import (
    BUFFER_BYTES,
    MAX_FRAME_BYTES,
    Answer,
    Call,
    CallFailed,
    Cancel,
    CancelCall,
    Close,
    FrameReader,
    FromEngine,
    LogLine,
    Outputs,
    PatientWriter,
    Problem,
    Refused,
    Start,
    StartFailed,
    ToEngine,
    WaitingWriter,
    Watch,
    WireError,
    error_of,
    frame,
    problem_of,
)
from runtime.engine.sampling_params import SamplingParams
from runtime.errors import OutOfMemoryError, XservError
from runtime.pooling import POOLING_TASKS

IDS = st.integers(0, 2**31 - 1)
TEXTS = st.text(max_size=8)
SECONDS = st.floats(allow_nan=False)
LOGPROBS = st.builds(
    TokenLogprobs,
    IDS,
    st.floats(allow_nan=False),
    IDS,
    st.lists(IDS, max_size=3),
    st.lists(st.floats(allow_nan=False), max_size=3),
)
OUTPUTS = st.builds(
    EngineOutput,
    request_id=TEXTS,
    index=IDS,
    new_token_ids=st.lists(IDS, max_size=3),
    num_prompt_tokens=IDS,
    logprobs=st.none() | st.lists(LOGPROBS, max_size=2),
    prompt_logprobs=st.none() | st.lists(st.none() | LOGPROBS, max_size=2),
    finish_reason=st.sampled_from([None, "stop", "length", "abort", "error"]),
    stop_reason=st.none() | IDS,
    error=st.none() | TEXTS,
    times=st.none()
    | st.builds(
        RequestTimes,
        arrival_s=SECONDS,
        first_scheduled_s=st.none() | SECONDS,
        first_token_s=st.none() | SECONDS,
        last_token_s=st.none() | SECONDS,
    ),
    num_cached_tokens=st.none() | IDS,
    engine_died=st.booleans(),
)
PARAMS = st.builds(
    SamplingParams,
    n=st.integers(1, 128),
    temperature=st.floats(0, 10),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop=st.none() | st.text(min_size=1, max_size=4) | st.lists(st.text(min_size=1, max_size=4), max_size=3),
    max_tokens=st.none() | st.integers(1, 2**31 - 1),
    logit_bias=st.none() | st.dictionaries(IDS, st.floats(-100, 100), max_size=3),
    stop_token_ids=st.none() | st.lists(IDS, max_size=3),
    ignore_eos=st.booleans(),
)
REQUESTS = st.builds(
    EngineRequest,
    request_id=TEXTS,
    prompt_token_ids=st.lists(IDS, max_size=20),
    params=PARAMS,
    eos_token_ids=st.lists(IDS, max_size=3).map(tuple),
    priority=st.integers(-(2**63), 2**63 - 1),
    cache_salt=st.none() | TEXTS,
)
POOLED = st.builds(
    PoolingRequest,
    st.lists(IDS, max_size=9),
    st.none() | st.text(min_size=1, max_size=8),
    st.builds(ImageItem, digest=st.binary(), first_token=IDS, rows=IDS, columns=IDS, patches=st.binary()).map(
        lambda image: (image,)
    ),
    st.none() | st.text(min_size=1, max_size=8),
    st.sampled_from(POOLING_TASKS),
    st.none() | IDS,
    IDS,
)
PROBLEMS = st.builds(
    Problem,
    st.lists(TEXTS, min_size=1, max_size=3),
    TEXTS,
    st.dictionaries(TEXTS, st.none() | TEXTS | st.booleans() | st.integers(-9, 9) | st.lists(TEXTS, max_size=2)),
)
CONFIGS = st.builds(
    EngineConfig,
    max_num_seqs=st.integers(1, 2**40),
    kv_cache_bytes=st.none() | st.integers(1, 2**40),
    prefill_chunk_stages=st.none() | st.just((64, 32, 2, 999)),
    exact=st.booleans(),
    ttft_target_s=st.floats(0.001, 100),
)
TO_ENGINE = (
    REQUESTS
    | st.builds(Cancel, TEXTS, st.none() | IDS)
    | st.builds(Watch, st.booleans())
    | st.builds(Call, IDS, st.just("load_adapter"), st.tuples(TEXTS | st.lists(IDS, max_size=9), TEXTS))
    | st.builds(Call, IDS, st.just("embed"), pooled=POOLED)
    | st.builds(CancelCall, IDS)
    | st.builds(Close, st.booleans())
    | st.builds(
        Start,
        model=st.none() | TEXTS,
        config=CONFIGS,
        log_level=st.integers(0, 50),
        hang_timeout_s=SECONDS,
    )
)
VIEWS = st.builds(
    StepView,
    step=IDS,
    start_s=SECONDS,
    duration_s=SECONDS,
    chunks=st.lists(st.builds(ChunkView, TEXTS, IDS, IDS, IDS, IDS, SECONDS), max_size=3),
    num_running=IDS,
    num_waiting=IDS,
    num_blocks=IDS,
    num_free_blocks=IDS,
    num_cached_blocks=IDS,
    preempted=st.lists(TEXTS, max_size=2),
    block_map=st.none() | TEXTS,
)
FROM_ENGINE = (
    st.builds(Outputs, st.lists(OUTPUTS, max_size=4), IDS, IDS, IDS, IDS)
    | st.builds(Refused, TEXTS, PROBLEMS)
    | st.builds(StartFailed, PROBLEMS)
    | st.builds(Answer, IDS, st.lists(IDS, max_size=2), st.binary(max_size=64).map(bytearray))
    | st.builds(CallFailed, IDS, PROBLEMS)
    | st.builds(LogLine, TEXTS, st.integers(0, 50), TEXTS, SECONDS, st.none() | TEXTS)
    | VIEWS
)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@settings(max_examples=60, deadline=None)
@given(message=TO_ENGINE)
def test_what_is_sent_to_the_engine_arrives(message: Any) -> None:
    assert msgspec.msgpack.decode(frame(message)[4:], type=ToEngine) == message


@settings(max_examples=60, deadline=None)
@given(message=FROM_ENGINE)
def test_what_the_engine_sends_arrives(message: Any) -> None:
    assert msgspec.msgpack.decode(frame(message)[4:], type=FromEngine) == message


def test_numbers_of_numpy_are_sent_as_pythons() -> None:
    params = SamplingParams(temperature=np.float32(0.5), logit_bias={np.int32(3): np.float64(1.5)})
    numbers: Any = {"prompt_token_ids": [np.int64(1)], "priority": np.int64(-2), "ttft_target_s": np.float32(2.0)}
    found = msgspec.msgpack.decode(frame(EngineRequest(request_id="x", params=params, **numbers))[4:], type=ToEngine)
    plain: Any = {"prompt_token_ids": [1], "priority": -2, "ttft_target_s": 2.0}
    assert found == EngineRequest(request_id="x", params=params, **plain)
    with pytest.raises(TypeError, match="cannot be sent"):
        frame(Call(1, "logits", (object(),)))  # type: ignore[arg-type]


def test_every_message_is_told_apart_by_its_tag() -> None:
    for union in (ToEngine, FromEngine):
        tags = [kind.__struct_config__.tag for kind in get_args(union)]
        assert None not in tags
        assert len(set(tags)) == len(tags)


@settings(max_examples=40, deadline=None)
@given(messages=st.lists(FROM_ENGINE, max_size=6), data=st.data())
def test_frames_arrive_however_they_are_cut(messages: list[Any], data: st.DataObject) -> None:
    stream = b"".join(frame(message) for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)])]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader, found = FrameReader(ours), []
        for piece in pieces:
            theirs.sendall(piece)
            ours.setblocking(False)
            try:
                while True:
                    found += [msgspec.msgpack.decode(each, type=FromEngine) for each in reader.read()]
            except BlockingIOError:
                pass
        assert found == messages


def test_long_messages_and_the_end(ends: tuple[socket.socket, socket.socket]) -> None:
    """Longer than the buffer, several in a row; the buffer does not stay as long."""
    ours, theirs = ends
    sizes = (3 * BUFFER_BYTES, 0, BUFFER_BYTES, 7, 10**6)
    sent = [Answer(number, [1], bytearray([number]) * size) for number, size in enumerate(sizes)]

    def send() -> None:
        for message in sent:
            WaitingWriter(theirs).send(frame(message))
        theirs.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=send)
    thread.start()
    reader, found = FrameReader(ours), []
    while messages := reader.read():
        found += [msgspec.msgpack.decode(each, type=Answer) for each in messages]
    thread.join()
    assert found == sent
    assert len(reader._buffer) == BUFFER_BYTES


def test_a_message_that_claims_too_much_is_refused(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    theirs.sendall(struct.pack("<I", MAX_FRAME_BYTES + 1))
    with pytest.raises(WireError, match="at most"):
        FrameReader(ours).read()


def test_a_message_too_long_to_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.engine.process.wire.MAX_FRAME_BYTES", 1000)
    assert len(frame(Answer(1, [], bytearray(900)))) < 1000
    with pytest.raises(WireError, match="too long: at most 1,000"):
        frame(Answer(1, [], bytearray(1001)))


def test_a_patient_writer_never_waits_and_keeps_the_order(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    writer = PatientWriter(ours)
    sent = [Answer(i, [], bytearray(50_000)) for i in range(100)]
    for message in sent:  # nobody reads
        writer.send(frame(message))
    reader, found = FrameReader(theirs), []
    while len(found) < len(sent):
        found += [msgspec.msgpack.decode(each, type=Answer) for each in reader.read()]
    assert found == sent
    ours.shutdown(socket.SHUT_RDWR)
    writer.close()
    writer.send(frame(sent[0]))
    assert not writer._thread.is_alive()


def test_a_patient_writer_whose_reader_is_gone(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    writer = PatientWriter(ours)
    for _ in range(100):
        writer.send(frame(Answer(1, [], bytearray(50_000))))
    theirs.close()
    writer._thread.join(20)
    assert not writer._thread.is_alive()
    writer.send(frame(Watch(True)))
    writer.close()


ERRORS = [
    RequestError("wrong", param="n", code="odd"),
    ContextLengthExceededError(200, 128),
    QueueFullError(5, 2.5),
    EngineDeadError("dead", 3.0),
    WeightsError("bad weights", ["a", "b"]),
    HubOfflineError("no network"),
    DeviceOutOfMemoryError("no room", requested_bytes=2**40),
    OutOfMemoryError("no room"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_cross_as_themselves(error: Exception) -> None:
    problem = msgspec.msgpack.decode(msgspec.msgpack.encode(problem_of(error)), type=Problem)
    found = error_of(problem)
    assert type(found) is type(error)
    assert str(found) == str(error)
    attributes = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(error).items()}
    assert vars(found) == attributes


def test_attributes_that_cannot_be_sent_are_left_out() -> None:
    error = LaunchError("failed", kernel="k", grid=(1, 2, 3))
    found = error_of(problem_of(error))
    assert isinstance(found, LaunchError)
    assert vars(found) == {"kernel": "k", "block": None, "shared_bytes": None}


def test_errors_that_are_not_ours() -> None:
    found = error_of(problem_of(FileNotFoundError(2, "No such file", "/x")))
    assert isinstance(found, FileNotFoundError)
    assert (found.filename, found.strerror) == ("/x", "No such file")
    assert isinstance(error_of(problem_of(MemoryError())), OutOfMemoryError)
    odd = error_of(problem_of(ZeroDivisionError("secret")))
    assert type(odd) is XservError
    assert "ZeroDivisionError" in str(odd)
    assert "secret" not in str(odd)


def test_the_nearest_known_class_is_taken() -> None:
    problem = problem_of(RequestError("wrong", param="x"))
    stranger = msgspec.structs.replace(problem, kinds=["elsewhere.NewError", *problem.kinds])
    assert type(error_of(stranger)) is RequestError
    assert type(error_of(Problem(["builtins.SystemExit"], "x", {}))) is XservError
