"""The recipe of docs/examples for a field of a step: its text alone, applied to a copy of the code, gives a model an
array in all kinds of steps."""

from __future__ import annotations

from pathlib import Path

from tests.runtime import recipes

SERVED = """
from runtime.batch import STEP_FIELDS
from runtime.bench.scheduling.engines import local
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.steps.decode_arrays import DecodeArrays
from runtime.engine.steps.inputs import StepMemory
from runtime.llm import LLM

assert list(STEP_FIELDS)[-2:] == ["choices", "starts"]
written = {"decodes": 0, "others": 0}
place, write = DecodeArrays.place, StepMemory.write

def placed(self, rows, starts, num_batch_slots, numbers=None):
    found = place(self, rows, starts, num_batch_slots, numbers)
    assert (self._columns["starts"][found.batch_slots] == starts).all()
    written["decodes"] += 1
    return found

def checked(self, inputs, layout, draws):
    write(self, inputs, layout, draws)
    arrays = inputs.arrays
    lengths = np.diff(arrays["query_start"])
    assert (arrays["starts"] + lengths == arrays["seq_lens"]).all()
    assert arrays["choices"].shape == arrays["token_ids"].shape
    written["others"] += 1

DecodeArrays.place, StepMemory.write = placed, checked
answers = {}
for mode in ("on", "off"):
    with LLM(max_num_seqs=4, decode_graphs=mode, max_num_batched_tokens=16, max_model_len=256) as llm:
        params = SamplingParams(n=2, temperature=0.0, max_tokens=12, logprobs=1, ignore_eos=True)
        (found,) = llm.generate(["Once upon a time there was a little dog"], params)
        answers[mode] = [(each.token_ids, each.cumulative_logprob) for each in found.outputs]
        assert (llm.client.stats().num_graph_steps > 0) == (mode == "on")
assert answers["on"] == answers["off"]
(first, _), (second, _) = answers["on"]
assert first != second, "each choice has its own number"
assert min(written.values()) > 0, written
"""


def test_it_reaches_the_model(tmp_path: Path) -> None:
    recipes.apply("step_field.diff", tmp_path)
    recipes.run(tmp_path, SERVED)
