"""Steps compiled for the tests of passes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from step_world import CPU, everywhere

from flowrt.passes import Compiled, StepTerms, compile_step

if TYPE_CHECKING:
    from flowrt.passes.step import StepGraph


def names(step: StepGraph) -> list[str]:
    return [node.name for node in step.nodes.values()]


def named(step: StepGraph, name: str) -> Any:
    return next(node for node in step.nodes.values() if node.name == name)


def compiled(fetches: list[Any], targets: Any = (), feeds: Any = (), **options: Any) -> Compiled:
    graph = (fetches + list(targets))[0].graph
    settings: dict[str, Any] = {"devices": [CPU], "default": CPU, "supports": everywhere} | options
    return compile_step(graph, fetches, targets, feeds, StepTerms(**settings))
