"""docs/pipeline_arguments.md has the arguments of `pipeline`; each has tests that show its effect."""

import inspect
import re

from ipu_pipeline.pipelining_ops import pipeline
from tests.support import pages
from tests.support.programs import ROOT

PAGE = (ROOT / "docs" / "pipeline_arguments.md").read_text()
PARAMETERS = inspect.signature(pipeline).parameters
TESTS = {
    "computational_stages": (
        "tf1/session/test_session.py::test_training_equals_the_reference",
        "tf1/ops/test_pipelining_ops.py::test_parallel_stages",
        "engine/tracing/test_parallel_stages.py::test_they_run_at_the_same_time",
        "engine/tracing/test_stage_parameters.py::test_parameters_equal_plain_jax",
    ),
    "gradient_accumulation_count": (
        "engine/programs/test_accumulation.py::test_traced_counts",
        "engine/programs/test_accumulation.py::test_an_unusable_count_is_found_before_anything_runs",
    ),
    "gradient_accumulation_dtype": (
        "engine/programs/test_accumulation.py::test_accumulator_dtypes",
        "engine/programs/test_accumulation.py::test_accumulator_dtypes_of_the_front",
    ),
    "repeat_count": (
        "tf1/session/test_session.py::test_training_equals_the_reference",
        "tf1/session/test_session.py::test_repeats_and_runs_compile_nothing_new",
    ),
    "batch_serialization_iterations": (
        "engine/programs/test_accumulation.py::test_each_stage_takes_a_group_before_the_next_one_starts",
        "engine/programs/test_accumulation.py::test_batch_serialization_of_the_front",
    ),
    "inputs": ("tf1/session/test_session.py::test_computing_around_pipelines",),
    "infeed_queue": (
        "tf1/session/test_session.py::test_one_infeed_in_two_pipelines",
        "tf1/session/test_session.py::test_end_of_data_in_a_run_keeps_completed_updates",
    ),
    "outfeed_queue": ("tf1/session/test_session.py::test_outfeed_modes_and_structures",),
    "optimizer_function": (
        "tf1/test_replicas_front.py::test_other_numbers_and_options_equal_a_plain_loop",
        "tf1/program/test_loss_weights.py::test_equals_one_large_batch",
        "tf1/session/test_session.py::test_training_equals_the_reference",
        "tf1/ops/test_pipelining_ops.py::test_var_list_and_extra_arguments_of_the_update",
    ),
    "device_mapping": (
        "tf1/ops/test_pipelining_ops.py::test_parallel_stages",
        "engine/test_pipeline.py::test_each_stage_s_variables_are_on_its_own_device",
        "reports/test_placement_report.py::test_one_ipu_needs_no_edges_but_the_feed",
    ),
    "pipeline_schedule": (
        "tf1/ops/test_pipelining_ops.py::test_schedules",
        "engine/schedules/test_schedules.py::test_staircases",
        "engine/planning/test_memory.py::test_live_bytes_are_those_of_the_formula",
    ),
    "recomputation_mode": (
        "engine/programs/test_recomputation.py::test_what_is_kept",
        "engine/programs/test_recomputation.py::test_allow_recompute_decides_at_run",
        "engine/planning/test_memory.py::test_recomputation_on_one_ipu_needs_less_memory",
    ),
    "forward_propagation_stages_poplar_options": (
        "tf1/program/test_stage_options.py::test_each_argument_of_the_front_reaches_its_programs",
        "tf1/program/test_stage_options.py::test_an_option_changes_what_is_compiled",
    ),
    "backward_propagation_stages_poplar_options": (
        "tf1/program/test_stage_options.py::test_each_argument_of_the_front_reaches_its_programs",
    ),
    "weight_update_poplar_options": (
        "tf1/program/test_stage_options.py::test_each_argument_of_the_front_reaches_its_programs",
        "tf1/program/test_stage_options.py::test_one_program_gets_all",
    ),
    "offload_weight_update_variables": (
        "engine/devices/test_offloading.py::test_arguments_of_pipeline",
        "engine/devices/test_offloading.py::test_activations_lie_in_host_memory_between_forward_and_backward",
    ),
    "replicated_optimizer_state_sharding": (
        "tf1/test_replicas_front.py::test_what_replicas_share_out",
        "engine/programs/test_accumulation.py::test_nothing_is_sharded_over_one_replica",
    ),
    "offload_activations": (
        "engine/devices/test_offloading.py::test_arguments_of_pipeline",
        "engine/devices/test_offloading.py::test_activations_lie_in_host_memory_between_forward_and_backward",
    ),
    "offload_gradient_accumulation_buffers": (
        "engine/devices/test_offloading.py::test_arguments_of_pipeline",
        "engine/devices/test_offloading.py::test_results_are_the_same_to_the_last_bit",
    ),
    "replicated_weight_sharding": (
        "engine/programs/test_accumulation.py::test_nothing_is_sharded_over_one_replica",
    ),
    "offload_weights": (
        "engine/devices/test_offloading.py::test_arguments_of_pipeline",
        "engine/devices/test_offloading.py::test_forwards_only",
    ),
    "continuous_weight_updates": ("tf1/ops/test_pipelining_ops.py::test_wrong_calls",),
    "outfeed_loss": (
        "tf1/session/test_session.py::test_training_equals_the_reference",
        "tf1/ops/test_pipelining_ops.py::test_wrong_calls",
    ),
    "accumulate_outfeed": (
        "queues/test_outfeed_options.py::test_the_sum_of_losses",
        "queues/test_outfeed_options.py::test_the_sums_of_outputs",
    ),
    "accumulate_outfeed_dtype": (
        "queues/test_outfeed_options.py::test_a_wider_sum",
        "queues/test_outfeed_options.py::test_the_sums_of_outputs",
    ),
    "outfeed_mask": ("queues/test_outfeed_options.py::test_masks",),
    "reduction_method": ("engine/programs/test_accumulation.py::test_reduction_methods_in_every_form",),
    "name": (
        "tf1/ops/test_pipelining_ops.py::test_names_keep_optimizers_apart",
        "tf1/session/test_session.py::test_optimizer_state_is_kept_by_pipeline_name",
    ),
    "dispatch_plan": (
        "tf1/program/test_dispatch_plans_front.py::test_a_chosen_plan_is_kept_and_given_again",
        "engine/test_random_pipelines.py::test_equal_the_unsplit_model",
    ),
    "tensor_parallel": (
        "engine/execution/test_tensor_parallel.py::test_sessions_and_checkpoints",
        "engine/test_features.py::test_equals_a_plain_loop",
        "engine/execution/test_tensor_parallel.py::test_arguments_of_the_front",
        "engine/execution/test_tensor_parallel.py::test_what_is_not_usable",
    ),
    "max_shapes": (
        "tf1/test_shapes_front.py::test_outputs_of_different_shapes_and_an_end_of_the_data",
        "tf1/test_shapes_front.py::test_one_shape_only",
        "tf1/test_shapes_front.py::test_too_many_shapes_leave_the_data_where_they_are",
    ),
    "shapes": (
        "engine/test_micro_batch_shapes.py::test_named_shapes_are_compiled_with_the_first",
        "engine/test_micro_batch_shapes.py::test_a_wrong_shape_is_told_before_anything_runs",
    ),
    "pipeline_depth": ("engine/programs/test_accumulation.py::test_the_older_name_of_the_count",),
}


def test_the_page_has_each_argument_with_its_default():
    expected = [
        name
        if parameter.default is inspect.Parameter.empty
        else f"{name}={getattr(parameter.default, 'name', parameter.default)}"
        for name, parameter in PARAMETERS.items()
    ]
    rows = re.findall(r"^\| `(\w+(?:=[^`]+)?)` \| [^|]+\. \|$", PAGE, re.MULTILINE)
    assert sorted(row for row in rows if not row.endswith("Error")) == sorted(expected)


def test_the_docstring_has_the_arguments_in_their_order():
    arguments = inspect.getdoc(pipeline).partition("\nArgs:\n")[2].partition("\nReturns:\n")[0]
    assert re.findall(r"^  (\w+): ", arguments, re.MULTILINE) == list(PARAMETERS)


def test_each_argument_has_tests_that_exist():
    assert list(TESTS) == list(PARAMETERS)
    for name, tests in TESTS.items():
        assert tests, name
        for test in tests:
            path, _, function = test.partition("::")
            assert function in pages.functions_of(ROOT / "tests" / path), test
