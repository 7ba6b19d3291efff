"""Hopper's matrix products on the real device: each tile and way out, splits, gates, ragged edges."""

from __future__ import annotations

import pytest

from tests.gpu.reuse import on_hardware
from tests.numba_kernels.cuda import test_gemm_fused as fused
from tests.numba_kernels.cuda import test_gemm_hopper as hopper
from tests.numba_kernels.cuda import test_hopper_few as few
from tests.numba_kernels.cuda import test_hopper_intrinsics as intrinsics

pytestmark = pytest.mark.usefixtures("on_hopper")

test_equals_float64 = on_hardware(hopper.test_equals_float64)
test_integers_on_few_multiprocessors = on_hardware(hopper.test_integers_are_exact_on_few_multiprocessors)
test_rows_on_any_bounds = on_hardware(hopper.test_rows_on_any_bounds)
test_residual_in_place = on_hardware(hopper.test_residual_may_be_the_output_and_nothing_beyond_is_written)
test_any_company = on_hardware(hopper.test_rows_have_the_same_bits_in_any_company_and_by_any_tile)
test_nan = on_hardware(hopper.test_nan_stays_in_its_row)
test_split = on_hardware(hopper.test_a_sum_split_among_a_cluster)
test_normalised_rows = on_hardware(fused.test_normalised_rows)
test_squares_that_are_left = on_hardware(fused.test_squares_that_are_left)
test_gated_units = on_hardware(fused.test_gated_units)
test_exact_gated_rows = on_hardware(fused.test_exact_rows_have_the_same_bits_in_any_company)
test_auto = on_hardware(hopper.test_auto_takes_it_for_many_rows)
test_a_tile = on_hardware(intrinsics.test_a_tile_by_tma_and_wgmma)
test_few_rows_equal_float64 = on_hardware(few.test_equals_float64)
test_few_rows_in_several_tiles = on_hardware(few.test_integers_are_exact_where_blocks_have_several_tiles)
test_few_rows_in_any_company = on_hardware(few.test_a_row_has_the_same_bits_in_any_company)
test_few_rows_keep_nan = on_hardware(few.test_nan_stays_in_its_row_and_nothing_beyond_is_written)
