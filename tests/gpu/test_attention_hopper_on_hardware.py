"""Hopper's prefill attention on the real device, where that is one."""

from __future__ import annotations

import pytest

from tests.gpu.reuse import on_hardware
from tests.numba_kernels.cuda import test_attention_hopper as hopper

pytestmark = pytest.mark.usefixtures("on_hopper")

test_equals_float64 = on_hardware(hopper.test_equals_float64)
test_head_dims = on_hardware(hopper.test_head_dims)
test_sinks = on_hardware(hopper.test_sinks)
test_equal_scores = on_hardware(hopper.test_equal_scores_give_the_mean_of_integers_exactly)
test_one_key = on_hardware(hopper.test_a_query_that_points_at_one_key_gets_its_value_exactly)
test_padding = on_hardware(hopper.test_a_padded_sequence_gives_zeros_and_blocks_below_the_window_need_not_exist)
test_nan = on_hardware(hopper.test_nan_in_a_query_or_a_key_stays_in_the_rows_that_see_it)
test_scales = on_hardware(hopper.test_large_and_odd_scales)
