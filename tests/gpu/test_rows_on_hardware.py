"""Kernels that work row by row, and sampling, on the real device."""

from __future__ import annotations

from tests.gpu.reuse import on_hardware
from tests.numba_kernels.cuda import test_activation as activation
from tests.numba_kernels.cuda import test_embedding as embedding
from tests.numba_kernels.cuda import test_logprobs as logprobs
from tests.numba_kernels.cuda import test_norm as norm
from tests.numba_kernels.cuda import test_sampling as sampling
from tests.numba_kernels.cuda import test_softmax as softmax

test_activation = on_hardware(activation.test_against_float64)
test_activation_far_out = on_hardware(activation.test_far_out)
test_glu = on_hardware(activation.test_glu)
test_embedding_rows = on_hardware(embedding.test_rows)
test_embedding_bad_ids = on_hardware(embedding.test_an_id_outside_the_table_is_flagged_and_reads_nothing_else)
test_norm = on_hardware(norm.test_against_float64)
test_norm_residual = on_hardware(norm.test_a_residual_is_added_to_the_norm_before_it_is_rounded)
test_norm_large_mean = on_hardware(norm.test_a_large_mean_does_not_cancel)
test_softmax = on_hardware(softmax.test_against_float64)
test_softmax_masked_rows = on_hardware(softmax.test_masked_rows)
test_logprobs = on_hardware(logprobs.test_equal_float64)
test_sampling_draws_what_the_cpu_draws = on_hardware(sampling.test_draws_what_the_cpu_draws)
test_sampling_flat_and_peaked = on_hardware(sampling.test_flat_and_peaked_rows)
test_sampling_large_vocabulary = on_hardware(sampling.test_a_large_vocabulary)
test_sampling_masks = on_hardware(sampling.test_masks_bias_and_penalties)
test_sampling_impossible_rows = on_hardware(sampling.test_rows_that_cannot_be_drawn_are_flagged_and_others_unharmed)
