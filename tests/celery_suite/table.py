"""What is known of Celery's suite: which tests run where, and what ends differently under a guard."""

from pathlib import Path

ROOT = Path(__file__).parents[2]

LEFT_OUT = ("test_backend.py",)
"""Needs an account with Azure."""

_LOOPS = "`starmap` of a guarded task is refused"
DIFFERENCES = {
    "test_canvas.py::test_xmap_xstarmap::test_starmap_in_a_group_and_a_chain": _LOOPS,
    "test_canvas.py::test_xmap_xstarmap::test_starmap_keeps_frozen_id_and_link": _LOOPS,
    "test_worker.py::test_django_fixup_installs_django_task_for_celery_subclass": (
        "Celery gives Django's task class to apps that have none of their own; here each has the guarded one"
    ),
}
"""What ends differently under a guard, and why; docs/evidence.md tells it in a sentence."""


def _tests(where: str, names: str) -> tuple[str, ...]:
    return tuple(f"{where}::test_{name}" for name in names.split())


CHORD = "test_canvas.py::test_chord"

WHOLE = (
    ("test_canvas.py::test_chain", "test_canvas.py::test_group"),
    (CHORD,),
    _tests(
        CHORD,
        """
        disabling_flag_allow_error_cb_on_chord_header enabling_flag_allow_error_cb_on_chord_header
        flag_allow_error_cb_on_chord_header_on_upgraded_chord nested_chord_header_link_error
        error_propagates_from_chord error_propagates_from_chord2 large_header
        """,
    ),
    (
        "test_backend_leak_in_fixture_teardown.py",
        "test_beat.py",
        "test_group_chains.py",
        "test_inspect.py",
        "test_mem_leak_in_exception_handling.py",
    ),
)
"""What each process of a side runs, but for what is named apart; one more runs all the rest."""

PART = (
    (
        *_tests(
            CHORD,
            """
            add_to_chord add_chord_to_chord chord_order chord_on_error chord_in_chain_with_args
            chord_in_chords_with_chains chain_chord_chain_chord group_chain group_kwargs single_task_header
            eager_chord_inside_task empty_header_chord nested_chord nested_chord_group nested_group_chain
            nested_chord_group_chain_group_tail parallel_chords parent_ids replaced_nested_chord
            chord_header_task_replaced_with_chain chord_header_child_replaced_with_chain_last
            chord_body_task_replaced_with_chain chord_body_chain_child_replaced_with_chain_last
            error_propagates_from_chord2 error_propagates_to_chord_from_simple
            error_propagates_to_chord_from_chain error_propagates_to_chord_from_group
            immutable_errback_called_by_chord_from_simple immutable_errback_called_by_chord_from_chain
            link_option_runs_after_the_body link_error_option_runs_on_body_failure
            link_error_option_runs_on_header_failure
            """,
        ),
        *_tests(
            "test_canvas.py::test_group",
            """
            group_lone nested_group_group nested_group_chord_body_chain ready_with_exception
            task_replace_with_group_preserves_group_order group_child_with_callback_replaced
            group_child_with_errback_replaced
            """,
        ),
    ),
    (
        *_tests(
            "test_canvas.py::test_chain",
            """
            simple_chain complex_chain chain_on_error chain_inside_group_receives_arguments
            chain_of_chain_with_a_single_task chain_of_chords_with_two_tasks chain_of_nine_chords
            chain_of_a_chord_and_a_group_with_two_tasks chain_of_task_a_group_and_a_chord
            chain_replaced_with_a_chain_and_a_callback chain_replaced_with_a_chain_and_an_error_callback
            chain_child_replaced_with_chain_first chain_with_callback_child_replaced
            chain_with_errback_child_replaced chain_children_with_errbacks eager_chain_inside_task
            group_chord_group_chain group_results_in_chain header_failure_fails_the_chords_after_it
            replace_chain_with_empty_chain second_order_replace
            """,
        ),
        *_tests("test_canvas.py::test_link_error", "link_error link_error_using_signature"),
        *_tests(
            "test_canvas.py::test_stamping_mechanism", "replace_merge_stamps stamps_remain_on_task_retry"
        ),
        *_tests("test_tasks.py::test_class_based_tasks", "class_based_task_retried"),
        *_tests("test_tasks.py::test_task_replacement", "replaced_task_nesting_level_1"),
        *_tests(
            "test_tasks.py::test_tasks",
            """
            basic_task fail fail_with_unpickleable_exception pydantic_annotations properties
            reject_with_requeue_redelivers_and_succeeds reject_without_requeue_stores_failure
            retry_switches_from_args_to_kwargs retry_with_unpickleable_exception task_retried_headers
            task_retried_once task_retried_once_with_expires task_retried_priority wrong_arguments
            """,
        ),
    ),
)
"""The same of the part; nothing runs beside it. Canvas, replaced tasks, retries, links and errors."""

TEETH = frozenset(_tests(CHORD, "group_kwargs single_task_header chord_in_chain_with_args"))
"""Tests that notice when a chord does not see what its members return."""
