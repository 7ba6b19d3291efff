"""Matrix products on the real device."""

from __future__ import annotations

from tests.gpu.reuse import on_hardware
from tests.numba_kernels.cuda import test_gemm as gemm
from tests.numba_kernels.cuda import test_gemv as gemv

test_equals_float64 = on_hardware(gemm.test_equals_float64)
test_integers_are_exact = on_hardware(gemm.test_integers_are_exact)
test_plain_b = on_hardware(gemm.test_plain_b)
test_float32_output_of_narrow_factors = on_hardware(gemm.test_float32_output_of_narrow_factors)
test_large_tiles = on_hardware(gemm.test_large_tiles)
test_no_depth_leaves_bias_and_residual = on_hardware(gemm.test_no_depth_leaves_bias_and_residual)
test_exact_rows_are_the_same_in_any_batch = on_hardware(gemm.test_exact_rows_are_the_same_alone_and_in_any_batch)
test_writes_nothing_beyond_its_output = on_hardware(gemm.test_writes_nothing_beyond_its_output)
test_factors_on_no_16_byte_bounds = on_hardware(gemm.test_factors_on_no_16_byte_bounds)
test_nan_stays_in_its_row = on_hardware(gemm.test_nan_stays_in_its_row)
test_gemv_equals_float64 = on_hardware(gemv.test_equals_float64)
test_gemv_integers_are_exact = on_hardware(gemv.test_integers_are_exact)
test_gemv_rows_are_independent = on_hardware(gemv.test_a_row_is_the_same_in_any_company_of_eight)
