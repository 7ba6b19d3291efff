"""Samples a step's tokens from its logits: tokens, validity, log probabilities, and accepted draft tokens, by
comparison or by rejection sampling. Updates the executor's rows."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from numba_kernels.sampler_chain import MU
from runtime import ops
from runtime.engine.logits.processing import Failure
from runtime.engine.logits.settings import PLAIN, LogitsSettings
from runtime.engine.messages import TokenLogprobs
from runtime.engine.steps.decode_graphs import DecodeRun
from runtime.engine.steps.executor import DrawMasks, Model
from runtime.engine.steps.inputs import read_sampled
from runtime.engine.steps.layout import StepLayout, largest
from runtime.engine.steps.persistent_batch import LaidOut, PersistentBatch, Samples
from runtime.engine.steps.pooling_pass import slices
from runtime.engine.steps.recorder import Computed
from runtime.engine.steps.sampler import logprobs_of, token_logprobs, with_logits
from runtime.engine.steps.step_input import PromptLogprobs, Sampled, StepInput
from runtime.sampling_arrays import SampledTokens, SamplingArrays
from runtime.tensor.tensor import Tensor


class SamplingResults:
    """Samples for the rows of an executor, over the vocabulary of its model."""

    def __init__(
        self, model: Model, rows: PersistentBatch, vocab_size: int, processing: LogitsSettings = PLAIN
    ) -> None:
        self._processing = processing
        self._model = model
        self._rows = rows
        self._vocab_size = vocab_size

    def sample(
        self,
        wanted_of_prompts: list[PromptLogprobs],
        laid_out: LaidOut,
        masks: DrawMasks | None,
        proposed: Sequence[NDArray[np.float32] | None] | None,
        computed: Computed,
    ) -> Sampled:
        """Sample from the logits that the model computed.

        laid_out  its broken samples are not valid
        proposed  distributions of the draft tokens, by chunk; with None they are accepted if they equal the sample
        """
        logits, (_, samples, arrays, broken) = computed.logits, laid_out
        prompt_logprobs = [
            self._prompt_logprobs(computed.hidden, wanted, laid_out.layout) for wanted in wanted_of_prompts
        ]
        if logits is None:
            return Sampled(prompt_logprobs=prompt_logprobs)
        failed: list[int] = []
        raw, failures = logits, dict[int, Failure]()
        if self._rows.sampling.are_processed(samples.rows):
            logits, failures = self._processed(logits, samples)
        if masks is not None:
            batch_slots, words, failed = masks.wait()
            assert arrays.allowed_mask is not None, "rows with masks were loaded so"
            arrays.allowed_mask[batch_slots] &= words[:, : arrays.allowed_mask.shape[1]]
        if computed.sampled is not None:
            tokens = read_sampled(computed.sampled, len(samples.rows), has_chains=arrays.has_chains)
        else:
            tokens = ops.sample(logits, arrays)
        token_ids, is_valid, mus = tokens
        if samples.proposals is not None and samples.counts is not None:
            token_ids, is_valid = token_ids.copy(), is_valid.copy()
            waiting = {} if mus is None else self._with_mirostat(samples.rows, samples.counts)
            if waiting:
                tokens = SampledTokens(token_ids, is_valid, mus)
                follow_mirostat(logits, arrays, list(waiting.values()), samples.proposals, tokens)
            if proposed is not None:  # those of mirostat are accepted if they equal the sample
                proposed = [None if i in waiting else each for i, each in enumerate(proposed)]
                if any(each is not None for each in proposed):
                    reject(logits, arrays, samples.counts, samples.proposals, proposed, token_ids, is_valid)
        if failed or broken or failures:
            token_ids, is_valid = token_ids.copy(), is_valid.copy()
            is_valid[[*failed, *broken, *failures]] = False
        if logits is not raw and logits.device.kind != "cpu":
            failures |= self._left_nothing(samples.rows, is_valid, {*failed, *broken, *failures})
        tells_processed = self._processing.tells_processed
        logprobs = self._logprobs(samples.rows, token_ids, is_valid, logits if tells_processed else raw, arrays=arrays)
        sampled = Sampled(
            token_ids=token_ids.tolist(),
            is_valid=is_valid.tolist(),
            counts=samples.counts,
            logprobs=logprobs,
            mus=None if mus is None else mus.tolist(),
            prompt_logprobs=prompt_logprobs,
            broken=broken,
            failures=failures,
        )
        rows, positions = samples.rows, samples.positions
        if samples.proposals is not None:
            sampled, kept = _accepted(sampled, samples.proposals.tolist())
            rows, positions, token_ids = rows[kept], positions[kept], token_ids[kept]
            mus = None if mus is None else mus[kept]
        self._rows.note(rows, token_ids)
        if mus is not None:
            self._rows.note_mus(rows, mus, samples.version)
        if np.count_nonzero(self._rows.sampling.keeps_outputs[rows]):
            self._rows.note_outputs(rows, positions, token_ids, samples.version)
        return sampled

    def of_graph(self, step: StepInput, run: DecodeRun, tokens: SampledTokens, version: int) -> Sampled:
        """The samples of a decode graph. ``version``: the rows', when the step began."""
        rows, (token_ids, is_valid, mus) = self._rows, tokens
        rows.note(step.rows, token_ids)
        if mus is not None:
            rows.note_mus(step.rows, mus, version)
        if run.keeps_outputs:
            positions = step.starts + 1 - rows.sampling.num_prompt_tokens[step.rows]
            rows.note_outputs(step.rows, positions, token_ids, version)
        logprobs = None
        if run.logits is not None:
            logprobs = self._logprobs(step.rows, token_ids, is_valid, run.logits, run.batch_slots)
        return Sampled(
            token_ids=token_ids.tolist(), is_valid=is_valid.tolist(), logprobs=logprobs,
            mus=None if mus is None else mus.tolist(),
        )  # fmt: skip

    def _processed(self, logits: Tensor, samples: Samples) -> tuple[Tensor, dict[int, Failure]]:
        """The logits after the rows' processors, and the samples that failed."""
        sampling = self._rows.sampling
        outputs = sampling.outputs(samples.rows, samples.positions)
        return sampling.processors.apply(logits, samples.rows.tolist(), outputs, self._model.suppressed_ids)

    def _left_nothing(
        self, rows: NDArray[np.int64], is_valid: NDArray[np.bool_], others: set[int]
    ) -> dict[int, Failure]:
        """The failures of samples that kernels have left no token."""
        processors = self._rows.sampling.processors
        invalid = [i for i in np.flatnonzero(~is_valid).tolist() if i not in others]
        return {i: processors.left_nothing(int(rows[i])) for i in invalid if processors.acts_on(int(rows[i]))}

    def _with_mirostat(self, rows: NDArray[np.int64], counts: list[int]) -> dict[int, tuple[int, int]]:
        """The chunks with drafts whose samples depend on those before them, with the first and the end of each's
        samples."""
        ends, chains = np.cumsum(counts).tolist(), self._rows.sampling.chains
        return {
            i: (end - count, end)
            for i, (end, count) in enumerate(zip(ends, counts))
            if count > 1 and chains.has_mirostat(int(rows[end - count]))
        }

    def _logprobs(
        self,
        rows: NDArray[np.int64],
        token_ids: NDArray[np.int32],
        is_valid: NDArray[np.bool_],
        logits: Tensor,
        batch_slots: NDArray[np.intp] | None = None,
        arrays: SamplingArrays | None = None,
    ) -> list[TokenLogprobs | None] | None:
        """``rows``: of each sample; ``batch_slots``: its row of the logits, or None if these are all, in order;
        ``arrays``: the samples' parameters, if processed logits are told."""
        counts = self._rows.sampling.num_alternatives[rows]
        if largest(counts) < 0:
            return None
        wanted = np.flatnonzero((counts >= 0) & is_valid)
        if not wanted.size:
            return None
        if batch_slots is not None or len(wanted) < len(counts):
            indices = wanted if batch_slots is None else batch_slots[wanted]
            logits = ops.gather_rows(logits, Tensor.from_numpy(indices.astype(np.int32)).to(logits.device))
        if self._processing.tells_processed:
            assert arrays is not None, "no graph samples these rows"
            logits = ops.processed_logits(logits, arrays.at(wanted))
        found = token_logprobs(logits, token_ids[wanted], counts[wanted].tolist())
        if self._processing.tells_logits:
            found = with_logits(found, logits)
        named = self._rows.sampling.logprob_ids
        for place, row in enumerate(rows[wanted].tolist()) if named else ():
            if row in named:
                of_row = logprobs_of(logits, place, named[row], is_normalized=not self._processing.tells_logits)
                found[place] = msgspec.structs.replace(found[place], top_ids=named[row].tolist(), top_logprobs=of_row)
        logprobs: list[TokenLogprobs | None] = [None] * len(counts)
        for i, entry in zip(wanted.tolist(), found):
            logprobs[i] = entry
        return logprobs

    def _prompt_logprobs(
        self, hidden: Tensor | None, wanted: PromptLogprobs, layout: StepLayout
    ) -> list[TokenLogprobs]:
        assert hidden is not None, "the last stage has it"
        entries, begin = [], wanted.first
        for first, end in slices(self._vocab_size, begin, begin + len(wanted.targets)):
            adapters: list[Tensor] = []
            if layout.has_adapters:
                adapters = ops.place([np.ascontiguousarray(layout.arrays["adapters"][first:end])], hidden.device)
            logits = self._model.compute_logits(hidden[first:end], *adapters)
            targets = wanted.targets[first - begin : end - begin]
            entries += token_logprobs(logits, targets, [wanted.num_alternatives] * (end - first))
        return entries


def _accepted(sampled: Sampled, proposals: list[int]) -> tuple[Sampled, list[int]]:
    """The tokens of each chunk up to the first sample that differs from its draft token, and the indices of these
    samples."""
    assert sampled.counts is not None
    kept: list[int] = []
    counts: list[int] = []
    first = 0
    for most in sampled.counts:
        last, end = first, first + most
        while last + 1 < end and sampled.is_valid[last] and sampled.token_ids[last] == proposals[last]:
            last += 1
        kept += range(first, last + 1)
        counts.append(last + 1 - first)
        first = end
    accepted = Sampled(
        token_ids=[sampled.token_ids[i] for i in kept],
        is_valid=[sampled.is_valid[i] for i in kept],
        counts=counts,
        logprobs=None if sampled.logprobs is None else [sampled.logprobs[i] for i in kept],
        mus=None if sampled.mus is None else [sampled.mus[i] for i in kept],
        prompt_logprobs=sampled.prompt_logprobs,
        broken=[at for at, i in enumerate(kept) if i in sampled.broken],
        failures={at: sampled.failures[i] for at, i in enumerate(kept) if i in sampled.failures},
    )
    return accepted, kept


def follow_mirostat(
    logits: Tensor, arrays: SamplingArrays, reached: list[tuple[int, int]], proposals: NDArray[np.int32],
    tokens: SampledTokens,
) -> None:  # fmt: skip
    """Sample again after each draft token that was sampled, with mirostat's mu after it, and write to ``tokens``.

    reached  of each chunk with mirostat, the first and the end of its samples
    """
    token_ids, is_valid, mus = tokens
    assert mus is not None, "with chains"
    numbers = arrays.chain_words.view(np.float32)
    while True:
        reached = [
            (at + 1, end) for at, end in reached if at + 1 < end and is_valid[at] and token_ids[at] == proposals[at]
        ]
        if not reached:
            return
        places = np.array([at for at, _ in reached])
        numbers[arrays.chain_start[places] + MU] = mus[places - 1]
        batch_slots = Tensor.from_numpy(places.astype(np.int32)).to(logits.device)
        found = ops.sample(ops.gather_rows(logits, batch_slots), arrays.at(places))
        token_ids[places], is_valid[places], mus[places] = found.token_ids, found.ok, found.mus


def reject(
    logits: Tensor,
    arrays: SamplingArrays,
    counts: list[int],
    proposals: NDArray[np.int32],
    proposed: Sequence[NDArray[np.float32] | None],
    token_ids: NDArray[np.int32],
    is_valid: NDArray[np.bool_],
) -> None:
    """Write the result of rejection sampling to the samples ``[n]`` of ``token_ids`` and ``is_valid``, for the chunks
    that have ``proposed``: accepted draft tokens, then the replacement. If all are accepted, the last sample stands.

    logits     [n, vocab_size], and ``arrays``, their parameters
    counts     samples of each chunk, one more than its draft length
    proposals  [n] draft token that each sample is compared with
    """
    firsts = np.cumsum(counts) - counts
    chosen = [i for i, each in enumerate(proposed) if each is not None]
    nums = np.array([counts[i] - 1 for i in chosen], np.int32)
    rows = np.concatenate([np.arange(firsts[i], firsts[i] + counts[i] - 1) for i in chosen])
    batch_slots = Tensor.from_numpy(rows.astype(np.int32)).to(logits.device)
    wanted = ops.distributions(ops.gather_rows(logits, batch_slots), arrays.at(rows))
    own = np.concatenate([each for each in proposed if each is not None])
    heads = firsts[chosen]
    kept, instead = ops.keep_proposals(
        wanted, own, proposals[rows], nums, arrays.seed[heads], arrays.choice_index[heads], arrays.position[rows]
    )
    for first, most, count, token_id in zip(heads.tolist(), nums.tolist(), kept.tolist(), instead.tolist()):
        token_ids[first : first + count] = proposals[first : first + count]
        is_valid[first : first + count] = True
        if count < most:
            token_ids[first + count] = token_id
            is_valid[first + count] = token_id >= 0
