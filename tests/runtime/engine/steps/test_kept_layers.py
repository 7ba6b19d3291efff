"""Hidden states behind chosen layers, as steps leave them: of every token, however its step was run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.device.gpu import Gpu
from runtime.engine.engine import Engine
from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.steps.layout import BlockTables, lay_out
from runtime.engine.steps.step_input import StepInput
from runtime.kv.cache import KVCache
from tests.models.folders import load_golden, write_model
from tests.runtime.engine.fakes import collect
from tests.runtime.engine.graph_cases import mixed_requests, new_engine


def alone(engine: Engine, token_ids: NDArray[np.int32], layers: tuple[int, ...]) -> list[NDArray[Any]]:
    """What stands behind the layers, of one sequence in one pass."""
    model, size = engine.executor.model, engine.limits.block_size  # type: ignore[attr-defined]
    spec, count = model.kv_cache_spec(size), -(-len(token_ids) // size)
    num_groups = len(spec.group_kinds)
    tables = BlockTables(num_groups, 1, count, size)
    for group in range(num_groups):
        tables.add(group, 0, 0, range(group * count, (group + 1) * count))
    one = np.array([0]), np.array([0]), np.array([len(token_ids)])
    layout = lay_out(token_ids.astype(np.int32), *one, tables, np.empty(0, np.int32))
    batch = layout.batch(model.device, exact=engine.limits.exact)
    batch.auxiliary_layers = layers
    model.forward(batch, KVCache(spec, [num_groups * count] * len(spec.block_bytes)))
    return [batch.kept[layer].to("cpu").array.astype(np.float32) for layer in layers]


@pytest.mark.parametrize("graphs", ["on", "off"])
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("emulated:sm_90a", marks=[pytest.mark.emulator, pytest.mark.exhaustive])]
)
@pytest.mark.parametrize("name", ["llama_llama3_odd", "gemma3_odd", "gemma4_inputs_odd", "gemma4_inputs_odd last"])
def test_they_are_those_of_the_sequence_alone(name: str, device: str, graphs: str, tmp_path: Path) -> None:
    """With chunks, decodes beside them, prefix hits and preemption. On the emulated device chunks are shorter: a
    prompt has several of the same shape, which is recorded when it comes again."""
    name, _, rows = name.partition(" ")
    folder = write_model(tmp_path, load_golden(name))
    engine = new_engine(
        folder, device, decode_graphs=graphs, num_blocks=44, max_num_batched_tokens=11 if device == "cpu" else 6,
        dtype="float32", exact=True, overlap="off",
    )  # fmt: skip
    config = engine.executor.model.config  # type: ignore[attr-defined]
    layers = (config.num_layers,) if rows else (0, 1, config.num_layers - 1, config.num_layers)
    engine.executor.keep_layers(layers, config.hidden_size, engine.executor.model.dtype, of_last=bool(rows))  # type: ignore[attr-defined]
    seen: list[tuple[StepInput, list[Sequence]]] = []
    start = engine.executor.start

    def noted(step: StepInput, *rest: Any) -> Any:
        by_row = {sequence.row: sequence for sequence in engine.scheduler.running}
        seen.append((step, [by_row[row] for row in step.rows.tolist()]))
        return start(step, *rest)

    engine.executor.start = noted  # type: ignore[method-assign]
    for each in mixed_requests(9 if device == "cpu" else 3, config.vocab_size):
        engine.add(each)
    results: dict[str, Any] = {}
    num_checked = num_short = 0
    while engine.has_work:
        seen.clear()
        collect(engine.step(), results)
        for step, sequences in seen:
            kept = engine.executor.auxiliary_hidden_states
            assert kept is not None
            assert kept.number == step.number
            for i, sequence in enumerate(sequences):
                begin, end = int(step.starts[i]), int(step.starts[i] + step.counts[i])
                wanted = alone(engine, sequence.token_ids(0, end), layers)
                last, count = int(kept.last[i]), 1 if rows and len(kept.tensors[0]) < step.num_tokens else end - begin
                num_short += count < end - begin
                for given, whole in zip(kept.tensors, wanted, strict=True):
                    found = given.to("cpu").array.astype(np.float32)[last + 1 - count : last + 1]
                    assert np.array_equal(found, whole[end - count : end])
                    num_checked += count
    assert (num_short > 0) == bool(rows)
    stats = engine.stats()
    assert (stats.num_graph_steps > 0) == (graphs == "on")
    if device == "cpu" or Gpu.of(device).driver.is_emulated:  # a real one records forwards that wait for their launches
        assert (stats.num_forward_steps > 0) == (graphs == "on")
    assert num_checked > (40 if rows else 100)
    engine.close()
