"""Tests that are named elsewhere than where they stand: what `make test` leaves to `make test-all`, of tests that are
alike but for what they cost, and what it runs again under other layouts. A name that selects no test is an error.

A test of `LONG` is named by its file, its function and, where only some of its cases are meant, by words that all stand
in the case's name. Each is right and worth having before a release; here stands beside it what the default tests keep
of the same code. A run that collects all of a named file fails where no test answers to a name, so that no table can
outlive its tests; so does a run that was given a test's name which its marks leave nothing of.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

KERNELS = "tests/numba_kernels/cuda/"

_LINEAR = "tests/numba_kernels/cpu/test_linear.py"
_BITS = f"{_LINEAR}::test_sums_are_those_of_the_definition_to_the_bit"
_BLOCKS = "tests/numba_kernels/cpu/test_blocks.py::test_products_rows_and_tables"
_RANKS = "tests/runtime/linear/test_segments.py::test_many_sizes"
_GOLDENS = "tests/models/test_goldens.py"
_GOLDEN = f"{_GOLDENS}::test_float32_logits_and_greedy_continuation[qwen2_odd]"
SIZES = (
    "tests/models/test_registry.py::test_loading_takes_little_more_memory_than_one_copy",
    "tests/runtime/engine/ranks/test_pipeline.py::test_each_rank_says_what_it_holds",
    "tests/runtime/engine/speculation/test_eagle3.py::test_its_pages_and_weights_are_counted",
)

TELLING: dict[str, tuple[str, ...]] = {
    "portable": (f"{_LINEAR}::test_rows_of_any_size[float16]", f"{_BITS}[9-145-33-float16]", *SIZES),
    "avx2": (f"{_BITS}[9-145-33-int8]", f"{_RANKS}[int8]", f"{_BLOCKS}[Q8_0]", _GOLDEN, *SIZES),
    "avx512": (f"{_BITS}[9-145-33-int8]", _GOLDEN, *SIZES),
    "avx512_vnni": (f"{_BITS}[9-145-33-int8]", f"{_BLOCKS}[Q4_0]", _GOLDEN, *SIZES),
    "avx512_bf16": (
        f"{_BITS}[9-145-33-bfloat16]", f"{_RANKS}[bfloat16]",
        f"{_GOLDENS}::test_weights_rounded_to_bfloat16_with_float32_pages[qwen2_odd]", *SIZES,
    ),
}  # fmt: skip
"""What each layout of the cpu's runs in a process of its own, where it is not the one in force
(`tests/numba_kernels/cpu/test_tiles.py`): one test a name."""

LONG: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    # Kernels: another tile, type or format of a tier that the same file has.
    (KERNELS + "test_attention.py", "test_equals_float64", ("flash-f32",)),
    (KERNELS + "test_attention.py", "test_head_dims", ("decode-bf16",)),
    (KERNELS + "test_byte_tiles.py", "test_sums_of_integers_are_exact", ("130-48-128",)),
    (KERNELS + "test_experts.py", "test_hopper_tiles", ("bf16",)),
    (KERNELS + "test_experts.py", "test_launches_do_not_depend_on_what_is_chosen", ()),
    (KERNELS + "test_experts.py", "test_normed_routes", ("bf16",)),
    (KERNELS + "test_experts.py", "test_what_takes_three_launches", ()),
    (KERNELS + "test_few_rows.py", "test_may_be_launched_before_the_kernel_in_front_ends", ("tensor_core",)),
    (KERNELS + "test_few_rows.py", "test_may_be_launched_before_the_kernel_in_front_ends", ("gemv-640",)),
    (KERNELS + "test_few_rows_packed.py", "test_blocks_that_share_k_change_no_bit", ()),
    (KERNELS + "test_few_rows_packed.py", "test_gated_units", ()),
    (KERNELS + "test_gemm.py", "test_equals_float64", ("register-bf16",)),
    (KERNELS + "test_gemm.py", "test_large_register_tiles", ()),
    (KERNELS + "test_gemm_choice.py", "test_what_tiers_read_of_the_cache_is_what_the_emulator_counts", ()),
    (KERNELS + "test_gemm_fused.py", "test_exact_rows_have_the_same_bits_in_any_company", ()),
    (KERNELS + "test_gemm_fused.py", "test_gated_units", ("few_rows",)),
    (KERNELS + "test_gemm_fused.py", "test_gated_units", ("hopper/small",)),
    (KERNELS + "test_gemm_hopper.py", "test_equals_float64", ("tile3",)),
    (KERNELS + "test_gemm_hopper.py", "test_integers_are_exact_on_few_multiprocessors", ()),
    (KERNELS + "test_gemm_hopper.py", "test_rows_on_any_bounds", ()),
    (KERNELS + "test_gemv.py", "test_equals_float64", ("f32",)),
    (KERNELS + "test_norm.py", "test_against_float64", ("layer_norm-f32",)),
    (KERNELS + "test_packed_tiles.py", "test_squares_are_left_for_the_norm_behind", ()),
    (KERNELS + "test_quantised_pages.py", "test_attention_equals_float64_of_what_the_pages_hold", ("f32",)),
    (KERNELS + "test_rounded_norm.py", "test_the_same_bits_as_two_launches", ("e4m3-static",)),
    (KERNELS + "test_sampling.py", "test_a_small_device_without_clusters", ()),
    (KERNELS + "test_segments.py", "test_all_tiles_give_the_same_segments", ()),
    (KERNELS + "test_attention.py", "test_equals_float64", ("naive-f32",)),
    (KERNELS + "test_attention.py", "test_tokens_that_see_each_other", ()),
    (KERNELS + "test_attention_exact.py", "test_a_query_that_points_at_one_key_gets_its_value_exactly", ()),
    (KERNELS + "test_byte_tiles.py", "test_products_of_e4m3", ()),
    (KERNELS + "test_experts.py", "test_exact_bits_depend_on_nobody_else", ()),
    (KERNELS + "test_experts.py", "test_experts_against_float64", ()),
    (KERNELS + "test_few_rows.py", "test_a_row_is_the_same_in_any_company_of_64", ()),
    (KERNELS + "test_few_rows_packed.py", "test_exact_rows_are_the_same_in_any_company", ()),
    (KERNELS + "test_gemm.py", "test_all_tiles", ()),
    (KERNELS + "test_gemm_fused.py", "test_gated_units", ("gemv",)),
    (KERNELS + "test_gemm_fused.py", "test_normalised_rows", ("hopper",)),
    (KERNELS + "test_gemm_hopper.py", "test_a_sum_split_among_a_cluster", ()),
    (KERNELS + "test_gemm_hopper.py", "test_rows_have_the_same_bits_in_any_company_and_by_any_tile", ()),
    (KERNELS + "test_hopper_bytes.py", "test_products", ("e4m3",)),
    (KERNELS + "test_norm.py", "test_a_residual_is_added_to_the_norm_before_it_is_rounded", ()),
    (KERNELS + "test_rope.py", "test_rope_equals_float64", ("f32",)),
    (KERNELS + "test_segments.py", "test_each_segment_is_a_product_of_its_own", ()),
    (KERNELS + "test_softmax.py", "test_against_float64", ("f32",)),
    (KERNELS + "test_attention.py", "test_decode_equals_float64", ()),
    (KERNELS + "test_attention_hopper.py", "test_equals_float64", ()),
    (KERNELS + "test_few_rows_packed.py", "test_equals_float64", ("u8",)),
    (KERNELS + "test_gemm.py", "test_equals_float64", ("tiled-bf16",)),
    (KERNELS + "test_gemm.py", "test_equals_float64", ("naive-bf16",)),
    (KERNELS + "test_hopper_packed.py", "test_equals_float64", ()),
    (KERNELS + "test_experts.py", "test_routes", ()),
    # Operations and models on emulated GPUs: their kernels are tested by themselves, whole models by test_goldens_gpu.
    ("tests/models/test_goldens_gpu.py", "test_float32", ()),
    ("tests/models/test_int8_gpu.py", "test_equals_the_model_whose_weights_lie_on_the_grid", ()),
    ("tests/runtime/backends/test_cuda_ops.py", "test_a_norm_between_products", ()),
    ("tests/runtime/backends/test_cuda_ops.py", "test_a_norm_of_small_weights_stays_apart_in_float16", ()),
    ("tests/runtime/backends/test_cuda_tensor.py", "test_floors_and_remainders", ()),
    ("tests/runtime/backends/test_cuda_tensor.py", "test_matmul", ()),
    ("tests/runtime/backends/test_cuda_tensor.py", "test_powers_and_signs", ()),
    ("tests/runtime/bench/kernels/test_bench_kernels.py", "test_every_part_is_verified_and_counted", ()),
    ("tests/runtime/bench/kernels/test_bench_kernels.py", "test_the_roofline_has_a_point_for_each_case", ()),
    ("tests/runtime/bench/kernels/test_step_profile.py", "test_an_emulated_devices_kernels_are_counted", ()),
    ("tests/runtime/linear/test_plans.py", "test_plans_go_with_the_last_weight_and_keep_none", ()),
    ("tests/runtime/linear/test_reordered_columns.py", "test_products", ()),
    ("tests/runtime/linear/test_rounded_rows.py", "test_products_of_blocks", ()),
    ("tests/runtime/linear/test_rounded_rows.py", "test_static_scales", ()),
    ("tests/runtime/linear/test_segments.py", "test_many_rows_take_turns_in_the_workspace", ()),
    ("tests/runtime/linear/test_segments.py", "test_ranks_on_gpus", ("bfloat16",)),
    ("tests/models/test_goldens_tiers.py", "test_attention", ()),
    ("tests/runtime/backends/test_cuda_ops.py", "test_linear_glu", ()),
    ("tests/runtime/backends/test_cuda_tensor.py", "test_strides_broadcasting_and_scalars", ()),
    ("tests/models/vision/test_vision.py", "test_on_emulated_gpus", ()),
    ("tests/runtime/backends/test_cuda_tensor.py", "test_reductions", ("float32",)),
    ("tests/runtime/test_latent_ops.py", "test_beside_numpy", ("dtype1", "emulated")),
    ("tests/tools/comparing/test_compare_triton.py", "test_the_command_counts_one_row", ()),
    ("tests/tools/gpu/kernels/test_quantized.py", "test_recorded_launches_do_it_again_and_nothing_is_missing", ()),
    ("tests/tools/test_kernel_report.py", "test_weights_are_on_their_way_before_the_wait", ("_16-16",)),
    ("tests/tools/test_kernel_report.py", "test_weights_are_on_their_way_before_the_wait", ("_64-16",)),
    # Engines on emulated GPUs: the rest of test_decode_graphs, and test_gpu_swapping, are left; ranks' collectives are
    # tested by runtime/emulator/nccl and linear/test_segments.
    ("tests/runtime/engine/ranks/test_gpu_ranks.py", "test_families_on_emulated_ranks", ()),
    ("tests/runtime/engine/steps/test_decode_graphs.py", "test_steps_that_lead_equal_steps_that_wait", ()),
    ("tests/runtime/engine/test_fuzz.py", "test_steps_on_the_emulated_gpu", ()),
    ("tests/runtime/engine/grammar/test_grammar_engine.py", "test_on_an_emulated_gpu_as_on_the_cpu", ()),
    ("tests/runtime/engine/steps/test_decode_graphs.py", "test_a_model_that_cannot_be_recorded_runs_eagerly", ()),
    ("tests/runtime/engine/steps/test_decode_graphs.py", "test_replay_equals_eager", ()),
    ("tests/runtime/engine/steps/test_decode_graphs.py", "test_without_memory_for_a_graph_steps_stay_eager", ()),
    ("tests/runtime/engine/test_gpu_engine.py", "test_stories260k_continues_as_transformers_does", ()),
    ("tests/runtime/engine/test_kv_cache_dtype.py", "test_a_gpu_gives_what_the_cpu_gives", ()),
    ("tests/runtime/engine/steps/test_decode_graphs.py", "test_a_failed_draw_does_not_reach_the_step_that_leads", ()),
    ("tests/runtime/engine/steps/test_decode_graphs.py", "test_who_arrives_is_not_kept_waiting_by_a_step_that_leads",
     ()),
    # Commands and tools that start engines, compilers or other checkouts: each has a smaller test beside it.
    ("tests/clients/test_clients.py", "test_a_library", ()),
    ("tests/clients/test_pictures.py", "test_openais_sdk_of_node", ()),
    ("tests/runtime/bench/test_memory.py", "test_a_model_is_served", ()),
    ("tests/runtime/commands/test_images.py", "test_the_command", ()),
    ("tests/runtime/parallel/test_ray.py", "test_ray_serve_from_one_replica_to_two", ()),
    ("tests/runtime/test_toy_parameter.py", "test_it_reaches", ("decodes",)),
    ("tests/tools/comparing/test_compare_checkouts.py", "test_each_workload_is_measured_on_both_sides", ()),
    ("tests/tools/comparing/test_compare_triton.py", "test_both_sides_do_the_work", ()),
    ("tests/tools/gpu/test_bundle.py", "test_a_check_in_a_bare_environment", ()),
    ("tests/tools/measuring/test_replay_prefixes.py", "test_conversations_hit_at_least_as_often_as_lru", ()),
    ("tests/tools/serving/test_soak.py", "test_traffic", ()),
    ("tests/tools/test_plot_attention.py", "test_a_grid_has_a_map_for_each_layer_and_head", ()),
    ("tests/runtime/bench/scheduling/test_exact.py", "test_the_demo_model_gives_the_same_bits_under_every_schedule",
     ()),
    ("tests/runtime/commands/test_kernels.py", "test_build_list_clear", ()),
    ("tests/runtime/engine/process/test_compile_kernels.py", "test_errors_of_the_processes_are_raised_here", ()),
    ("tests/runtime/engine/steps/test_forward_graphs.py", "test_a_shape_is_recorded_when_it_comes_again", ()),
    ("tests/runtime/parallel/test_ray.py", "test_what_has_no_room_is_refused", ()),
    ("tests/server/test_faults.py", "test_sigterm_under_load", ()),
    ("tests/tokenizer/test_against_library.py", "test_one_line_of_a_megabyte", ()),
    # Files of other layouts, families and types, of which each has one left.
    ("tests/models/gguf/test_experts.py", "test_quantised_is_its_dequantised_twin", ("gpt_oss",)),
    ("tests/models/gguf/test_latent.py", "test_quantised_is_its_dequantised_twin", ()),
    ("tests/models/gguf/test_model.py", "test_quantised_is_its_dequantised_twin", ("Q5_K",)),
    ("tests/models/gguf/test_model.py", "test_quantised_is_its_dequantised_twin", ("Q6_K",)),
    ("tests/models/quantized/test_fixtures.py", "test_logits_of_the_dequantised_twin", ("gptq",)),
    ("tests/models/vision/test_llava.py", "test_any_schedule_draws_the_same", ()),
    ("tests/numba_kernels/cpu/test_blocks.py", "test_products_rows_and_tables", ("Q5_K",)),
    ("tests/server/requests/test_tool_choice.py", "test_a_forced_call_in_every_notation", ("deepseek",)),
    ("tests/models/drafters/test_eagle3.py", "test_logits_are_those_of_speculators", ("two_layers",)),
    ("tests/models/drafters/test_mtp.py", "test_logits_are_those_of_transformers_layers", ("glm4",)),
    ("tests/models/gguf/test_model.py", "test_quantised_is_its_dequantised_twin", ("Q2_K",)),
    ("tests/models/gguf/test_model.py", "test_quantised_is_its_dequantised_twin", ("Q3_K",)),
    ("tests/models/gguf/test_model.py", "test_quantised_is_its_dequantised_twin", ("IQ4_XS",)),
    ("tests/models/quantized/test_fixtures.py", "test_logits_of_the_dequantised_twin", ("modelopt",)),
    ("tests/models/quantized/test_fixtures.py", "test_logits_of_the_dequantised_twin", ("_channel",)),
    ("tests/models/quantized/test_fixtures.py", "test_logits_of_the_dequantised_twin", ("_reordered",)),
    ("tests/models/test_goldens.py", "test_float16", ("F16-auto",)),
    ("tests/numba_kernels/cpu/test_quantised_pages.py", "test_equals_float64_of_what_the_pages_hold", ("chunks0",)),
    ("tests/numba_kernels/cpu/test_quantised_pages.py", "test_equals_float64_of_what_the_pages_hold", ("chunks3",)),
    ("tests/numba_kernels/cpu/test_quantised_pages.py", "test_equals_float64_of_what_the_pages_hold", ("chunks4",)),
    ("tests/runtime/emulator/tensor_cores/test_wgmma.py", "test_types_and_widths", ("88-",)),
    ("tests/runtime/engine/test_real_models.py", "test_a_hundred_requests_equal_their_lone_runs", ("off",)),
    ("tests/runtime/engine/test_rotary_switch.py", "test_an_answer_depends_on_its_own_length_alone", ("plain loop",)),
    ("tests/runtime/engine/test_rotary_switch.py", "test_an_answer_depends_on_its_own_length_alone", ("-4",)),
    ("tests/runtime/images/test_cutting.py", "test_cut", ("False",)),
    ("tests/runtime/images/test_cutting.py", "test_cut", ("-2",)),
    ("tests/server/requests/test_tool_choice.py", "test_a_forced_call_in_every_notation", ("mistral",)),
    ("tests/server/requests/test_tool_choice.py", "test_a_forced_call_in_every_notation", ("glm",)),
    ("tests/tokenizer/test_against_library.py", "test_a_novel", ("models/",)),
    # Groups of three ranks beside groups of two.
    ("tests/runtime/test_shared_communicator.py", "test_sums_and_gathers", ("3",)),
    ("tests/runtime/test_shared_communicator.py", "test_a_rank_ends_steps_before_the_others_do_up_to_a_bound", ("3",)),
    # Types, sizes and tiers of which each has another one left.
    (KERNELS + "test_activation.py", "test_against_float64", ("gelu_sigmoid-f32",)),
    (KERNELS + "test_activation.py", "test_against_float64", ("gelu_tanh-f32",)),
    (KERNELS + "test_activation.py", "test_against_float64", ("silu-f32",)),
    (KERNELS + "test_activation.py", "test_glu", ("f32-gelu_tanh",)),
    (KERNELS + "test_attention.py", "test_naive_gives_the_weights", ("bf16",)),
    (KERNELS + "test_embedding.py", "test_rows", ("f32",)),
    (KERNELS + "test_gemm.py", "test_exact_rows_are_the_same_alone_and_in_any_batch", ("auto-f32",)),
    (KERNELS + "test_gemm.py", "test_integers_are_exact", ("register-bf16",)),
    (KERNELS + "test_gemm_fused.py", "test_squares_that_are_left", ("hopper/narrow",)),
    (KERNELS + "test_gemm_fused.py", "test_gated_units", ("True-tensor_core-silu-(3, 40, 72)",)),
    (KERNELS + "test_gemm_hopper.py", "test_equals_float64", ("tile1",)),
    (KERNELS + "test_gemm_hopper.py", "test_residual_may_be_the_output_and_nothing_beyond_is_written", ("tile0",)),
    (KERNELS + "test_kv_cache.py", "test_write", ("f32",)),
    (KERNELS + "test_quantised_pages.py", "test_rows_are_written_as_numpy_and_the_cpu_do", ("f32",)),
    (KERNELS + "test_rope.py", "test_rope_equals_float64", ("10-10",)),
    (KERNELS + "test_softmax.py", "test_against_float64", ("False-bf16",)),
    ("tests/runtime/backends/test_cuda_ops.py", "test_what_the_cpu_gives", ("bfloat16",)),
    ("tests/runtime/backends/test_cuda_tensor.py", "test_two_operands", ("divide",)),
    ("tests/runtime/backends/test_cuda_tensor.py", "test_two_operands", ("less",)),
    ("tests/runtime/emulator/tensor_cores/test_products.py",
     "test_mma_is_exact_on_integers_and_close_on_others", ("32-s32-s8-u8",)),
    ("tests/runtime/emulator/tensor_cores/test_products.py",
     "test_mma_is_exact_on_integers_and_close_on_others", ("32-s32-u8-s8",)),
    ("tests/runtime/emulator/tensor_cores/test_products.py",
     "test_mma_is_exact_on_integers_and_close_on_others", ("32-f32-e4m3-e5m2",)),
    ("tests/runtime/emulator/tensor_cores/test_wgmma.py", "test_types_and_widths", ("f16-e4m3-e5m2",)),
    ("tests/runtime/emulator/tensor_cores/test_wgmma.py", "test_types_and_widths", ("s32-u8-s8",)),
    ("tests/runtime/engine/test_fuzz.py", "test_hundreds_of_steps_of_the_demo_model", ("settings2",)),
    ("tests/runtime/engine/test_real_models.py", "test_a_hundred_requests_equal_their_lone_runs", ("golden-on",)),
    ("tests/runtime/engine/test_rotary_switch.py", "test_answers_are_transformers", ("chunks-emulated",)),
    ("tests/runtime/test_latent_ops.py", "test_beside_numpy", ("dtype0", "emulated")),
    ("tests/runtime/test_scaling.py", "test_norms_of_whole_rows_and_scales_of_queries", ("layout0-emulated",)),
    ("tests/runtime/test_scaling.py", "test_norms_of_whole_rows_and_scales_of_queries", ("layout2-emulated",)),
    ("tests/runtime/test_scaling.py", "test_norms_of_whole_rows_and_scales_of_queries", ("layout4-emulated",)),
    ("tests/tools/test_kernel_report.py", "test_every_case", ("attention decode",)),
    ("tests/tools/test_plot_attention.py", "test_the_demo_models_weights_are_causal_and_sum_to_one", ()),
    ("tests/models/gguf/test_model.py", "test_quantised_is_its_dequantised_twin", ("MXFP4",)),
    ("tests/models/gguf/test_model.py", "test_quantised_is_its_dequantised_twin", ("Q4_K",)),
    ("tests/models/test_goldens.py", "test_float16", ("deepseek_v2_odd",)),
    ("tests/runtime/engine/process/test_handshake.py",
     "test_a_machine_that_has_gone_is_noticed_within_5_s_and_one_that_is_only_busy_is_not", ("idle",)),
    ("tests/runtime/engine/steps/test_decode_cpu.py", "test_replay_equals_eager_where_columns_are_reordered", ()),
    ("tests/runtime/test_cli.py", "test_completion", ("fish",)),
    ("tests/tools/test_kernel_report.py", "test_blocks_of_a_cluster_meet_without_a_fence_of_the_device",
     ("hopper_split",)),
    ("tests/runtime/parallel/test_fleet.py", "test_an_engine_that_is_stopped_gets_no_more_than_others_and_is_killed",
     ("least-load",)),
    ("tests/runtime/test_shared_communicator.py", "test_a_mistake_is_named_on_every_rank", ("other_count",)),
    ("tests/runtime/test_shared_communicator.py", "test_a_mistake_is_named_on_every_rank", ("swapped",)),
    ("tests/runtime/test_shared_communicator.py", "test_a_mistake_is_named_on_every_rank", ("one_fewer",)),
    ("tests/server/requests/test_tool_choice.py", "test_a_forced_call_in_every_notation", ("granite",)),
    ("tests/server/requests/test_tool_choice.py", "test_a_forced_call_in_every_notation", ("phi4_mini_json",)),
    ("tests/tokenizer/test_against_library.py", "test_a_novel", ("gpt-oss",)),
    ("tests/tokenizer/test_against_library.py", "test_random_texts", ("gpt-oss",)),
)  # fmt: skip


def mark_long(items: Sequence[pytest.Item], config: pytest.Config) -> None:
    """Marks the tests of `LONG` as exhaustive. Raises UsageError for a line of it or of `TELLING` that names no test,
    in a run that collects all of its file."""
    found = [False] * len(LONG)
    by_file: dict[str, list[int]] = {}
    for number, (file, _, _) in enumerate(LONG):
        by_file.setdefault(file, []).append(number)
    for item in items:
        file, _, name = item.nodeid.partition("::")
        function, _, case = name.partition("[")
        for number in by_file.get(file, ()):
            if LONG[number][1] == function and all(word in case for word in LONG[number][2]):
                found[number] = True
                item.add_marker(pytest.mark.exhaustive)
    in_default_run = {item.nodeid for item in items if item.get_closest_marker("exhaustive") is None}
    refuse_unknown(config, "tests/selection.py: LONG", _lines_without(found))
    names = {name for names in TELLING.values() for name in names}
    refuse_unknown(
        config, "tests/selection.py: TELLING (of the default run)",
        ((name.partition("::")[0], name) for name in sorted(names - in_default_run)),
    )  # fmt: skip


def _lines_without(found: Iterable[bool]) -> Iterator[tuple[str, str]]:
    for (file, function, words), is_there in zip(LONG, found, strict=True):
        if not is_there:
            yield file, f"{file}::{function}{list(words)}"


def refuse_unknown(config: pytest.Config, table: str, names: Iterable[tuple[str, str]]) -> None:
    """Raises UsageError for (file or folder, name) that a table has and no test answers to, where that is collected
    whole, or is not there."""
    unknown = [
        name for file, name in names if _collects(config, file) or not (config.rootpath / file).exists()
    ]  # fmt: skip
    if unknown:
        raise pytest.UsageError(f"{table}: no test answers to {', '.join(unknown)}")


def _collects(config: pytest.Config, file: str) -> bool:
    """True if a run collects all tests of a file or a folder, named from the root."""
    if config.option.deselect or config.option.ignore or config.option.ignore_glob:
        return False
    path = config.rootpath / file
    return any("::" not in arg and path.is_relative_to(_path_of(config, arg)) for arg in config.args)


def _path_of(config: pytest.Config, argument: str) -> Path:
    return (config.invocation_params.dir / argument.partition("::")[0]).resolve()


def refuse_unregistered_marks(config: pytest.Config) -> None:
    """Raises UsageError where ``-m`` has a word that is no mark: pytest would take it for one that no test has."""
    registered = {line.partition(":")[0].partition("(")[0].strip() for line in config.getini("markers")}
    expression = config.option.markexpr
    words = set(re.findall(r"[A-Za-z_]\w*", expression)) - {"and", "or", "not", "True", "False"} - registered
    if words:
        raise pytest.UsageError(f"-m {expression!r}: no mark is called {', '.join(sorted(words))}")


def refuse_empty_names(items: Sequence[pytest.Item], config: pytest.Config) -> None:
    """Raises UsageError for a test that the command line names and of which ``-m`` and ``-k`` leave nothing."""
    for argument in config.args:
        _, is_test, name = argument.partition("::")
        path = _path_of(config, argument)
        if not is_test or not path.is_relative_to(config.rootpath):
            continue
        wanted = f"{path.relative_to(config.rootpath).as_posix()}::{name}"
        if not any(item.nodeid == wanted or item.nodeid.startswith((f"{wanted}[", f"{wanted}::")) for item in items):
            chosen = f"-m {config.option.markexpr!r} -k {config.option.keyword!r}"
            raise pytest.UsageError(f"{argument} names no test that {chosen} leaves")
