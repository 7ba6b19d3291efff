"""Attention, its pages and what prepares them, on the real device."""

from __future__ import annotations

from tests.gpu.reuse import on_hardware
from tests.numba_kernels.cuda import test_attention as attention
from tests.numba_kernels.cuda import test_attention_exact as exact
from tests.numba_kernels.cuda import test_rope as rope

test_equals_float64 = on_hardware(attention.test_equals_float64)
test_decode_equals_float64 = on_hardware(attention.test_decode_equals_float64)
test_head_dims = on_hardware(attention.test_head_dims)
test_naive_gives_the_weights = on_hardware(attention.test_naive_gives_the_weights)
test_equal_scores = on_hardware(exact.test_equal_scores_give_the_mean_of_integers_exactly)
test_one_key = on_hardware(exact.test_a_query_that_points_at_one_key_gets_its_value_exactly)
test_exact_mode = on_hardware(exact.test_in_exact_mode_a_row_has_the_same_bits_alone_chunked_and_in_any_batch)
test_a_padded_sequence_gives_zeros = on_hardware(exact.test_a_padded_sequence_gives_zeros)
test_nan_in_a_query_stays_in_its_row = on_hardware(exact.test_nan_in_a_query_stays_in_its_row)
test_large_scores = on_hardware(exact.test_large_scores_neither_overflow_nor_underflow)
test_qkv_prepare = on_hardware(rope.test_qkv_prepare_equals_float64_and_the_cpu)
