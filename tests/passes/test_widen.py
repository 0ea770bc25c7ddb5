"""Casts around what is computed with floats of 16 bits: where they stand, and what stays as it was."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from step_world import CPU

import flowrt as fr
from flowrt.base.device import Device
from flowrt.base.plan import Plan, PlanNode
from flowrt.base.spec import is_half
from flowrt.passes import StepTerms, compile_step
from flowrt.session.runners import fusible, supports

GPU = Device.parse(str(CPU).replace("cpu:0", "cuda:0"))


def plan_of(fetches: list[Any], targets: Sequence[Any] = (), device: Device = CPU, **options: Any) -> Plan:
    graph = (fetches or list(targets))[0].graph
    feeds = [node.outputs[0] for node in graph.nodes if node.op.name == "placeholder"]
    compiled = compile_step(
        graph, fetches, targets, feeds, StepTerms(devices=[CPU, GPU], default=device, supports=supports, **options)
    )
    (plan,) = compiled.plans.values()
    return plan


def counted(nodes: Sequence[PlanNode]) -> Counter[str]:
    return Counter(node.op for node in nodes)


@pytest.mark.parametrize("optimize", [True, False])
def test_a_node_keeps_its_name_and_reads_and_answers_by_casts(optimize: bool) -> None:
    with fr.Graph():
        x = fr.placeholder("bfloat16", (4,))
        y = fr.exp(x, name="power")
    plan = plan_of([y], optimize=optimize)
    assert [(node.op, node.name) for node in plan.nodes] == [
        ("astype", "power/wide_0"),
        ("exp", "power"),
        ("astype", "power/rounded_0"),
    ]
    assert [node.outputs[0].dtype for node in plan.nodes] == ["float32", "float32", fr.bfloat16]


def test_every_reader_has_casts_of_its_own_and_what_moves_entries_has_none() -> None:
    with fr.Graph():
        x = fr.placeholder("float16", (4, 4))
        moved = fr.transpose(fr.concat([x[:2], x[1:3]], 0))
        fetches = [fr.exp(moved), fr.matmul(moved, x), fr.where([True, False, True, True], moved, x[::-1])]
    nodes = plan_of(fetches, optimize=False).nodes
    assert counted(nodes)["astype"] == 2 + 3  # of exp and of matmul, that of `moved` twice
    assert all(is_half(node.outputs[0].dtype) for node in nodes if node.op in ("transpose", "concat", "where"))


def test_few_numbers_are_widened_before_any_step_and_integers_are_left_alone() -> None:
    with fr.Graph():
        x = fr.placeholder("bfloat16", (4,))
        places = fr.argmax(x * 3) + 1
    nodes = plan_of([places]).nodes
    assert counted(nodes)["astype"] == 3  # of x, of the product, and of the product again
    constants = [node.attrs["value"] for node in nodes if node.op == "constant"]
    (three,) = (value for value in constants if value.dtype == np.float32)
    assert three == 3
    assert not three.flags.writeable


def test_bodies_are_widened_with_effects_too() -> None:
    with fr.Graph():
        v = fr.Variable(np.ones(3, fr.bfloat16), name="v")
        x = fr.placeholder("bfloat16", (3,))

        def body(i: Any, s: Any) -> Any:
            with fr.control_dependencies([v.assign(s * 2)]):
                return i + 1, fr.tanh(s)

        y = fr.while_loop(lambda i, s: i < 3, body, [np.int64(0), x])[1]
        z = fr.while_loop(lambda i, s: fr.sum(s) < 3, lambda i, s: (i + 1, s * 2), [np.int64(0), x])[1]
    checked = 0
    for plan in (plan_of([y]), plan_of([z]), plan_of([z], optimize=False)):
        for node in _all_nodes(plan):
            if node.op in ("tanh", "multiply", "sum"):
                assert not any(is_half(spec.dtype) for spec in node.outputs)
                checked += 1
    assert checked >= 5


def test_bodies_are_widened_where_nothing_around_them_is_of_16_bits() -> None:
    def inner(i: Any, s: Any) -> Any:
        return i + 1, fr.astype(fr.exp(fr.astype(s, "bfloat16")), "float32")

    def outer(i: Any, s: Any) -> Any:
        return i + 1, fr.while_loop(lambda j, t: j < 2, inner, [np.int64(0), s])[1]

    for body in (inner, outer):
        with fr.Graph():
            x = fr.placeholder("float32", (3,))
            y = fr.while_loop(lambda i, s: i < 3, body, [np.int64(0), x])[1]
        made = [node for node in _all_nodes(plan_of([y], optimize=False)) if node.op == "exp"]
        assert [node.outputs[0].dtype for node in made] == ["float32"]


def _all_nodes(plan: Plan) -> list[PlanNode]:
    inside = [value for node in plan.nodes for value in node.attrs.values() if isinstance(value, Plan)]
    return [*plan.nodes, *(node for body in inside for node in _all_nodes(body))]


def test_what_is_added_to_a_variable_is_added_where_it_lies() -> None:
    with fr.Graph():
        v = fr.Variable(np.ones(3, np.float16), name="v")
        x = fr.placeholder("float16", (3,))
        update = v.assign_add(x)
    assert [node.op for node in plan_of([], [update], optimize=False).nodes] == ["assign_add"]


def test_casts_are_fused_into_what_reads_and_answers() -> None:
    with fr.Graph():
        x = fr.placeholder("bfloat16", (400,))
        y = fr.tanh(x * x) - x
    assert [node.op for node in plan_of([y], fusible=fusible).nodes] == ["fused"]


def test_who_compiles_beside_a_program_need_not_have_met_such_floats() -> None:
    request = '[["bfloat16"], [["astype", [0], "float32"], ["astype", [1], "bfloat16"]], [2], [], [1, 1], ""]'
    code = f"import flowrt.kernels; from flowrt.kernels.fusion.fused import ordered_variants as o; o({request!r})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_gpus_products_take_the_bits() -> None:
    with fr.Graph():
        x, w = fr.placeholder("bfloat16", (3, 4)), fr.placeholder("bfloat16", (4, 5))
        y = x @ w
    found = counted(plan_of([y], device=GPU).nodes)
    assert (found["matmul_bfloat16"], found["matmul"], found["astype"]) == (1, 0, 1)


def test_a_step_without_such_floats_is_left_alone() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (3,))
        y = fr.exp(x)
    compiled = compile_step(graph, [y], (), [x], StepTerms(devices=[CPU], default=CPU, supports=supports))
    assert "widen" not in {report.name for report in compiled.report}
