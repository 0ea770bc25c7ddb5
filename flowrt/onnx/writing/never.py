"""Ops that are not written, and why."""

from __future__ import annotations

from flowrt.onnx.writing.writer import NEVER

WHY = {
    "it draws random numbers, which another runtime would draw otherwise": (
        "random_integers random_normal random_truncated_normal random_uniform stateful_cond stateful_loop"
    ),
    "it reads or changes state; fr.serving.freeze makes constants of variables": (
        "read_variable assign assign_add assign_sub add_rows sum_rows assign_rows adagrad_rows adam_rows momentum_rows "
        "rmsprop_rows enqueue enqueue_many dequeue dequeue_many dequeue_up_to queue_size queue_close"
    ),
    "it belongs to gradients; save what a model answers": (
        "avg_pool2d_spread class_cross_entropy_slope conv2d_filter_grad cross_entropy_slope gelu_slope group_rows "
        "linear_recurrence lstm_steps_grad max_pool2d_pick max_pool2d_spread place_along spread sums_about last_places"
    ),
    "it belongs to frames that are built by hand; use fr.cond and fr.while_loop": (
        "switch merge enter exit next_iteration loop_cond"
    ),
    "it takes floats of 16 bits, which are stored otherwise": (
        "matmul_bfloat16 matmul_float16 narrow_bfloat16 narrow_float16 widen_bfloat16 widen_float16"
    ),
    "it belongs to tables that are split over tasks": (
        "route_rows pack_parts part_of join_parts take_parts move_parts group_part"
    ),
    "only passes make it": (
        "append_row append_rows bag bring conv2d_bias fused matmul_bias no_rows recv send stack_rows with_epilogue"
    ),
    "it computes nothing": "no_op",
    "it is no input of the model: name it among those": "placeholder",
}
for _why, _ops in WHY.items():
    NEVER.update(dict.fromkeys(_ops.split(), _why))
