"""The arrays of decode steps: places that are kept, block tables on the device, what a step sends."""

from __future__ import annotations

import random

import numpy as np
import pytest

from runtime import ops
from runtime.device.device import Device
from runtime.engine.limits import EngineLimits
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.scheduling.sequence import Request, Sequence
from runtime.engine.scheduling.step import Chunk, Step
from runtime.engine.steps import decode_arrays
from runtime.engine.steps.assemble import Assembler
from runtime.engine.steps.decode_arrays import DecodeArrays
from runtime.engine.steps.persistent_batch import PersistentBatch
from runtime.engine.steps.recorder import open_recorder
from runtime.engine.steps.step_input import BlockAddition, StepInput
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


class Running:
    """Rows, the arrays over them, and what each sequence is expected to have there."""

    def __init__(self, device: Device) -> None:
        self.rows = PersistentBatch(NUM_PLACES, 8, 1, BLOCK_SIZE, 50)
        self.arrays = DecodeArrays(open_recorder(device), LIMITS, self.rows)
        self.sequences: dict[int, Sequence] = {}
        self.nothing = Tensor.from_numpy(np.zeros((NUM_PLACES + 1, 4), np.float32)).to(device)
        self._assembler = Assembler(LIMITS, "record")

    def load(self, row: int, rng: random.Random, **params: object) -> Sequence:
        """A sequence whose prompt is computed: it decodes next."""
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
        self.sequences[row] = sequence
        load = self._assembler.load_of(sequence)
        self.apply(self._assembler.assemble(self._step([row]), [load]).input)
        self.arrays.forget(row)
        return sequence

    def step(self) -> StepInput:
        """The decode step of all, whose additions are written."""
        made = self._assembler.assemble(self._step(sorted(self.sequences)), []).input
        self.apply(made)
        return made

    def apply(self, step: StepInput) -> None:
        for addition in step.additions:
            self.arrays.add(addition.group, addition.row, addition.first, addition.block_ids)
        self.rows.apply(step)
        self._assembler.sent(step)

    def _step(self, rows: list[int]) -> Step:
        step = Step(0, 64)
        for row in rows:
            step.chunks.append(Chunk(self.sequences[row], self.sequences[row].num_tokens - 1, 1, False, True))
        step.num_tokens = len(rows)
        return step


@pytest.fixture(params=["cpu", "emulated:sm_80"])
def device(request: pytest.FixtureRequest) -> Device:
    return Device.parse(request.param)


@pytest.fixture
def running(device: Device) -> Running:
    return Running(device)


def numpy_of(tensor: Tensor) -> np.ndarray:
    return tensor.to("cpu").array


def sent_changes(arrays: DecodeArrays) -> list[list[int]]:
    """The entries of block tables that came up with the last step, and their blocks."""
    (count,) = numpy_of(arrays._on_device["num_changes"])
    return numpy_of(arrays._tail[decode_arrays.int32])[: 2 * count].reshape(-1, 2).tolist()


def run_step(running: Running, num_batch_slots: int) -> np.ndarray:
    """Place and send a step of all running sequences and check what lies on the device; their places."""
    arrays, step = running.arrays, running.step()
    sequences, starts = [running.sequences[row] for row in step.rows.tolist()], step.starts
    arrays.place(step.rows, starts, num_batch_slots)
    arrays.place(step.rows[:1].copy(), starts[:1], num_batch_slots)  # not sent, so without effect
    placement = arrays.place(step.rows, starts, num_batch_slots)
    token_ids = np.array([sequence.last_token_id for sequence in sequences], np.int32)
    assert running.rows.last_tokens[step.rows].tolist() == token_ids.tolist()
    buffers = arrays.send(placement, token_ids)

    def work() -> Tensor:
        arrays.take_inputs(num_batch_slots)
        return ops.gather_rows(running.nothing, arrays._numbers[:num_batch_slots])  # any

    graph = arrays.recorder.record(work)
    arrays.launch(graph, placement, buffers, has_chains=False)
    buffers.wait()
    batch = arrays.batch(num_batch_slots, 64, has_adapters=False)
    tables, lengths = numpy_of(batch.block_tables[0]), numpy_of(batch.seq_lens)
    slots, ids, positions = (numpy_of(t) for t in (batch.slot_mappings[0], batch.token_ids, batch.positions))
    batch_slots = placement.batch_slots.tolist()
    assert len(set(batch_slots)) == len(batch_slots)
    assert all(0 <= batch_slot < num_batch_slots for batch_slot in batch_slots)
    for sequence, batch_slot, start in zip(sequences, batch_slots, starts.tolist()):
        assert tables[batch_slot, : len(sequence.blocks[0])].tolist() == sequence.blocks[0]
        assert lengths[batch_slot] == sequence.num_tokens
        assert (ids[batch_slot], positions[batch_slot]) == (sequence.last_token_id, start)
        assert slots[batch_slot] == sequence.blocks[0][start // BLOCK_SIZE] * BLOCK_SIZE + start % BLOCK_SIZE
    empty = sorted({*range(num_batch_slots)} - {*batch_slots})
    assert (slots[empty] == -1).all()
    assert not lengths[empty].any()
    assert not ids[empty].any()
    assert not positions[empty].any()
    return placement.batch_slots.copy()


@pytest.mark.parametrize("tail_words", [decode_arrays.TAIL_WORDS, 8])
def test_random_steps(device: Device, monkeypatch: pytest.MonkeyPatch, tail_words: int) -> None:
    """Sequences come, grow and go; with hardly any room for changes most go up by themselves."""
    monkeypatch.setattr(decode_arrays, "TAIL_WORDS", tail_words)
    running = Running(device)
    rng = random.Random(1)
    batch_slot_of: dict[Sequence, int] = {}
    num_kept = 0
    for _ in range(40):
        for row in range(NUM_PLACES):
            if rng.random() < 0.15:
                running.sequences.pop(row, None)
                if rng.random() < 0.7:
                    running.load(row, rng)
        if not running.sequences:
            continue
        num_batch_slots = next(size for size in (1, 2, 4, 8) if size >= len(running.sequences))
        batch_slots = run_step(running, num_batch_slots)
        for row, batch_slot in zip(sorted(running.sequences), batch_slots.tolist()):
            sequence = running.sequences[row]
            if batch_slot_of.get(sequence, num_batch_slots) < num_batch_slots:
                assert batch_slot_of[sequence] == batch_slot, "a sequence moved without need"
                num_kept += 1
            batch_slot_of[sequence] = batch_slot
            sequence.num_pending = 1
            sequence.append(rng.randrange(50))
            running.rows.last_tokens[row] = sequence.last_token_id
            if sequence.num_tokens > len(sequence.blocks[0]) * BLOCK_SIZE:
                sequence.blocks[0].append(rng.randrange(100))
            if sequence.num_tokens == 64:
                del running.sequences[row]
    assert num_kept > 50


def test_only_what_is_new_goes_up(running: Running) -> None:
    rng = random.Random(2)
    sequences = [running.load(row, rng) for row in range(3)]
    run_step(running, 4)
    run_step(running, 4)
    assert sent_changes(running.arrays) == []
    sequence = sequences[1]
    while sequence.num_tokens <= len(sequence.blocks[0]) * BLOCK_SIZE:
        sequence.num_pending = 1
        sequence.append(7)
    running.rows.last_tokens[1] = 7
    sequence.blocks[0] += [77, 78]
    batch_slots = run_step(running, 4)
    first = int(batch_slots[1]) * (LIMITS.max_model_len // BLOCK_SIZE) + len(sequence.blocks[0]) - 2
    assert sent_changes(running.arrays) == [[first, 77], [first + 1, 78]]


def test_an_entry_that_changes_goes_up(running: Running) -> None:
    sequence = running.load(0, random.Random(4))
    run_step(running, 1)
    ids = sequence.blocks[0]
    ids[-1] = (ids[-1] + 1) % 100
    step = running.step()
    step.additions = [BlockAddition(0, 0, len(ids) - 1, ids[-1:])]
    running.apply(step)
    run_step(running, 1)


def test_parameters_and_lists_lie_at_the_places(running: Running) -> None:
    rng, arrays = random.Random(3), running.arrays
    kinds: list[dict[str, object]] = [
        {"temperature": 0.5, "top_k": 7, "frequency_penalty": 0.5},
        {"temperature": 0.0},
        {"top_p": 0.25, "min_p": 0.125, "repetition_penalty": 1.5, "presence_penalty": -0.5},
    ]
    running.load(5, rng)
    arrays.place(np.array([5]), np.array([0]), 8)  # row 5 takes place 0
    running.sequences.clear()
    sequences = [running.load(2 * i, rng, **kind) for i, kind in enumerate(kinds)]
    step = running.step()
    placement = arrays.place(step.rows, step.starts, 4)
    positions = step.starts + 1 - running.rows.sampling.num_prompt_tokens[step.rows]
    lists = running.rows.sampling.penalty_lists(step.rows, positions)
    outputs = [ids.tolist() for _, ids in lists]
    assert outputs == [sequences[0].output_ids.tolist(), [], sequences[2].output_ids.tolist()]
    arrays.send(placement, np.zeros(3, np.int32), np.array([-1, 4, -1]), dict(zip(("prompt", "output"), zip(*lists))))
    held = {name: numpy_of(tensor) for name, tensor in arrays._on_device.items()}
    tail = numpy_of(arrays._tail[decode_arrays.int32])
    for sequence, batch_slot, (prompt, output) in zip(sequences, placement.batch_slots.tolist(), lists):
        params = sequence.request.params
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"):
            assert held[name][batch_slot] == np.float32(getattr(params, name)), name
        assert int(held["seed"].view(np.uint64)[batch_slot]) == sequence.request.seed
        assert held["choice_index"][batch_slot] == sequence.index
        assert held["position"][batch_slot] == sequence.num_output_tokens
        for name, ids in (("prompt", prompt), ("output", output)):
            start, end = held[f"{name}_start"][batch_slot], held[f"{name}_end"][batch_slot]
            assert tail[start:end].tolist() == ids.tolist()
    assert held["sources"][placement.batch_slots].tolist() == [-1, 4, -1]
    (empty,) = {0, 1, 2, 3} - {*placement.batch_slots.tolist()}
    assert held["repetition_penalty"][empty] == held["top_p"][empty] == 1.0
    assert held["temperature"][empty] == held["frequency_penalty"][empty] == 0.0
