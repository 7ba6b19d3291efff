"""The arrays of decode steps: places that are kept, block tables on the device, what a step sends."""

from __future__ import annotations

import random

import numpy as np
import pytest

from runtime.device.device import Device
from runtime.engine.config import EngineLimits
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.scheduling.sequence import Request, Sequence
from runtime.engine.steps import decode_arrays
from runtime.engine.steps.decode_arrays import DecodeArrays
from runtime.engine.steps.decode_graphs import open_decode_device
from runtime.engine.steps.sampler import Sampler
from runtime.tensor.tensor import Tensor

pytestmark = pytest.mark.emulator

NUM_PLACES = 8
BLOCK_SIZE = 8
LIMITS = EngineLimits(
    max_model_len=64,
    max_num_seqs=NUM_PLACES,
    max_num_batched_tokens=64,
    block_size=BLOCK_SIZE,
    num_blocks=100,
    max_waiting=10,
)


@pytest.fixture(params=["cpu", "emulated:sm_80"])
def arrays(request: pytest.FixtureRequest) -> DecodeArrays:
    device = Device.parse(request.param)
    return DecodeArrays(device, open_decode_device(device, LIMITS, 50), LIMITS, Sampler(NUM_PLACES, 50))


def new_sequence(arrays: DecodeArrays, row: int, rng: random.Random, **params: object) -> Sequence:
    """One whose prompt is computed: it decodes next."""
    prompt = np.array([rng.randrange(50) for _ in range(rng.randrange(1, 40))], np.int32)
    request = Request("r", prompt, SamplingParams(**params), max_tokens=20, arrival_s=0.0)  # type: ignore[arg-type]
    request.seed = rng.getrandbits(64)
    sequence = Sequence(request, rng.randrange(3))
    sequence.num_pending = 1
    sequence.append(rng.randrange(50))
    sequence.num_pending = 0
    sequence.blocks = [[rng.randrange(100) for _ in range(-(-sequence.num_tokens // BLOCK_SIZE))]]
    sequence.first_pages = [0]
    sequence.row = row
    arrays.sampler.load(row, sequence)
    arrays.forget(row)
    return sequence


def numpy_of(tensor: Tensor) -> np.ndarray:
    return tensor.to("cpu").array


def run_step(arrays: DecodeArrays, running: dict[int, Sequence], num_places: int) -> np.ndarray:
    """Place and send a step of all running sequences and check what lies on the device; their places."""
    rows = sorted(running)
    sequences = [running[row] for row in rows]
    starts = np.array([sequence.num_tokens - 1 for sequence in sequences])
    placement = arrays.place(sequences, rows, starts, num_places)
    arrays.place(sequences[:1], rows[:1], starts[:1], num_places)  # not sent, so without effect
    placement = arrays.place(sequences, rows, starts, num_places)
    buffers = arrays.send(placement, [sequence.last_token_id for sequence in sequences])

    def work() -> Tensor:
        arrays.take_inputs(num_places)
        return arrays._zeros  # any

    graph = arrays.runs_on.capture(work, num_rows=num_places, keeps_logits=False)
    arrays.launch(graph, placement, buffers)
    buffers.wait()
    batch = arrays.batch(num_places, 64)
    tables, lengths = numpy_of(batch.block_tables[0]), numpy_of(batch.seq_lens)
    slots, ids, positions = (numpy_of(t) for t in (batch.slot_mappings[0], batch.token_ids, batch.positions))
    places = placement.places.tolist()
    assert len(set(places)) == len(places)
    assert all(0 <= place < num_places for place in places)
    for sequence, place, start in zip(sequences, places, starts.tolist()):
        assert tables[place, : len(sequence.blocks[0])].tolist() == sequence.blocks[0]
        assert lengths[place] == sequence.num_tokens
        assert (ids[place], positions[place]) == (sequence.last_token_id, start)
        assert slots[place] == sequence.blocks[0][start // BLOCK_SIZE] * BLOCK_SIZE + start % BLOCK_SIZE
    empty = sorted({*range(num_places)} - {*places})
    assert (slots[empty] == -1).all()
    assert not lengths[empty].any()
    assert not ids[empty].any()
    assert not positions[empty].any()
    return placement.places.copy()


@pytest.mark.parametrize("tail_words", [decode_arrays.TAIL_WORDS, 8])
def test_random_steps(arrays: DecodeArrays, monkeypatch: pytest.MonkeyPatch, tail_words: int) -> None:
    """Sequences come, grow and go; with hardly any room for changes most go up by themselves."""
    monkeypatch.setattr(decode_arrays, "TAIL_WORDS", tail_words)
    rng = random.Random(1)
    running: dict[int, Sequence] = {}
    place_of: dict[Sequence, int] = {}
    num_kept = 0
    for _ in range(40):
        for row in range(NUM_PLACES):
            if rng.random() < 0.15:
                running.pop(row, None)
                if rng.random() < 0.7:
                    running[row] = new_sequence(arrays, row, rng)
        if not running:
            continue
        least = len(running)
        num_places = next(size for size in (1, 2, 4, 8) if size >= least)
        places = run_step(arrays, running, num_places)
        for row, place in zip(sorted(running), places.tolist()):
            sequence = running[row]
            if place_of.get(sequence, num_places) < num_places:
                assert place_of[sequence] == place, "a sequence moved without need"
                num_kept += 1
            place_of[sequence] = place
            sequence.num_pending = 1
            sequence.append(rng.randrange(50))
            if sequence.num_tokens > len(sequence.blocks[0]) * BLOCK_SIZE:
                sequence.blocks[0].append(rng.randrange(100))
            if sequence.num_tokens == 64:
                del running[row]
    assert num_kept > 50


def test_only_what_is_new_goes_up(arrays: DecodeArrays) -> None:
    rng = random.Random(2)
    running = {row: new_sequence(arrays, row, rng) for row in range(3)}
    run_step(arrays, running, 4)
    rows, sequences = sorted(running), [running[row] for row in sorted(running)]
    starts = np.array([sequence.num_tokens - 1 for sequence in sequences])
    assert arrays.place(sequences, rows, starts, 4).additions == []
    sequences[1].blocks[0] += [77, 78]
    (addition,) = arrays.place(sequences, rows, starts, 4).additions
    assert addition[1:] == (len(sequences[1].blocks[0]) - 2, [77, 78])


def test_parameters_and_lists_lie_at_the_places(arrays: DecodeArrays) -> None:
    rng = random.Random(3)
    kinds: list[dict[str, object]] = [
        {"temperature": 0.5, "top_k": 7, "frequency_penalty": 0.5},
        {"temperature": 0.0},
        {"top_p": 0.25, "min_p": 0.125, "repetition_penalty": 1.5, "presence_penalty": -0.5},
    ]
    arrays.place([new_sequence(arrays, 5, rng)], [5], np.array([0]), 8)  # row 5 takes place 0
    running = {2 * i: new_sequence(arrays, 2 * i, rng, **kind) for i, kind in enumerate(kinds)}
    rows, sequences = sorted(running), [running[row] for row in sorted(running)]
    starts = np.array([sequence.num_tokens - 1 for sequence in sequences])
    placement = arrays.place(sequences, rows, starts, 4)
    lists = arrays.sampler.penalty_lists(sequences, np.array(rows))
    arrays.send(placement, [0, 0, 0], np.array([-1, 4, -1]), lists)
    held = {name: numpy_of(tensor) for name, tensor in arrays._on_device.items()}
    tail = numpy_of(arrays._tail[decode_arrays.int32])
    for sequence, place, (prompt, output) in zip(sequences, placement.places.tolist(), lists):
        params = sequence.request.params
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"):
            assert held[name][place] == np.float32(getattr(params, name)), name
        assert int(held["seed"].view(np.uint64)[place]) == sequence.request.seed
        assert held["choice_index"][place] == sequence.index
        assert held["position"][place] == sequence.num_output_tokens
        for name, ids in (("prompt_start", prompt), ("output_start", output)):
            start, end = held[name][place : place + 2].tolist()
            assert tail[start:end].tolist() == ids.tolist()
    assert held["sources"][placement.places].tolist() == [-1, 4, -1]
    (empty,) = {0, 1, 2, 3} - {*placement.places.tolist()}
    assert held["repetition_penalty"][empty] == held["top_p"][empty] == 1.0
    assert held["temperature"][empty] == held["frequency_penalty"][empty] == 0.0
