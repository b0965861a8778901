"""A smoke run: each place of the package where versions of Celery, kombu and redis-py differ is met once."""

TESTS = (
    # redis-py: how a command is packed, sent and read; what a pool closes; what is sent again.
    "tests/test_wire.py::test_command_struck_anywhere_leaves_no_reply_behind",
    "tests/test_wire.py::test_connection_that_was_closed_while_idle_costs_no_attempt",
    "tests/test_wire.py::test_client_that_sends_nothing_again_meets_no_closed_connection",
    "tests/test_wire.py::test_scripts_that_were_forgotten_cost_three_round_trips",
    "tests/test_connection.py::test_client_sends_again_after_a_lost_reply",
    "tests/test_marks.py::test_many_keys_take_one_round_trip_and_equal_ones_meet",
    # redis-py: what a connection is made of, alone, by Sentinels, and in a cluster.
    "tests/test_connection.py::test_client_is_made_as_the_settings_say",
    "tests/test_connection.py::test_tls_verifies_unless_told_otherwise",
    "tests/test_connection.py::test_unix_socket_serves_locks",
    "tests/test_login.py::test_provider_of_credentials_logs_in",
    "tests/test_login.py::test_providers_log_in_to_sentinels_and_to_their_master",
    "tests/test_lone_primary.py::test_worker_starts_on_a_lone_primary",
    "tests/test_errors.py::test_server_that_names_no_slots_is_taken_at_its_word",
    # kombu: messages, and the queues that they go back to; batches; the timer of a worker.
    "tests/test_back.py::test_call_comes_back_as_it_was",
    "tests/test_way_back.py::test_each_copy_of_a_call_goes_back_to_its_own_queue[redis-bindings]",
    "tests/test_way_back.py::test_each_copy_of_a_call_goes_back_to_its_own_queue[memory-fanout]",
    "tests/test_way_back.py::test_native_delay_leads_to_one_queue_or_is_not_used",
    "tests/test_courier.py::test_courier_that_is_let_go_is_out_of_timer_reservation_and_prefetch",
    "tests/test_fanout.py::test_each_is_told_what_became_of_every_call",
    "tests/test_fanout.py::test_broker_that_dies_between_messages_leaves_exact_counts",
    # Celery where calls are published: arguments, options, signatures, beat, another class that sends later.
    "tests/test_beat.py::test_real_beat_ticks_by_the_settings_of_its_app",
    "tests/test_fanout.py::test_pydantic_models_are_keyed_as_the_worker_sees_them",
    "tests/test_publish.py::test_second_call_with_one_key_is_the_first",
    "tests/test_publish.py::test_plain_signature_is_deduplicated",
    "tests/test_publish.py::test_failed_send_frees_the_mark",
    "tests/test_publish.py::test_beat_entry_is_deduplicated_and_survives_a_refusal",
    "tests/test_later.py::test_what_another_class_returns_is_returned",
    # Celery where calls run: every policy, every kind of task, retries, results; canvases.
    "tests/test_worker_conflicts.py",
    "tests/test_fanout.py::test_result_is_ignored_as_the_task_or_the_option_says",
    "tests/test_events.py::test_events_are_sent_in_order_with_plain_values[wait-expected2]",
    "tests/test_joining.py::test_ten_joiners_end_with_the_one_result",
    "tests/test_canvas_dedupe.py::test_workflow_of_equal_calls_runs_them_all",
    "tests/test_canvas_dedupe.py::test_map_starmap_and_chunks_are_refused",
    "tests/test_canvas_dedupe.py::test_links_of_one_call_are_all_published",
    # Celery where they end otherwise: by its worker's parent, by a limit, by a revocation, by a shutdown.
    "tests/test_worker_crash.py::test_lock_of_a_killed_pool_process_is_freed_by_its_worker",
    "tests/exits/test_exit_returns.py::test_end_of_the_body_releases",
    "tests/exits/test_exit_returns.py::test_reject_with_requeue_releases_and_runs_again",
    "tests/exits/test_exit_retries.py::test_retries_at_once_release_or_keep_one_fence",
    "tests/exits/test_exit_retries.py::test_retry_that_is_dropped_frees_the_held_lock[revoked-prefork]",
    "tests/exits/test_exit_kills.py::test_hard_time_limit_frees[prefork-stubborn]",
    "tests/exits/test_exit_kills.py::test_terminate_frees",
    "tests/exits/test_exit_redelivery.py::test_redelivered_after_a_killed_child_runs_at_once[requeued_if_lost-prefork]",
    "tests/exits/test_exit_shutdowns.py::test_shutdown_keeps_the_lock_until_the_body_has_ended[warm-prefork]",
    # CPython: annotations, threads, forks, what is pickled. The server: the lock.
    "tests/test_annotations.py",
    "tests/test_threads.py",
    "tests/test_forks.py",
    "tests/test_exceptions.py",
    "tests/test_lock.py",
)
