"""What a graph tells of a step: tensors that are named where it is built, to be fetched together and written.

Law: a graph notes what it tells and computes nothing for it; a step that does not fetch it pays nothing. What the
function of a trainer's model tells are metrics of that trainer, as it is built once for each replica: `train/built`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowrt.base.errors import GraphError, SpecError, user_site
from flowrt.base.plain import is_whole, shortened
from flowrt.base.tracebacks import brief
from flowrt.base.valueclass import valueclass
from flowrt.graph import Graph, Tensor, current_graph, current_scope
from flowrt.op import as_value
from flowrt.ops.slices import IndexedSlices
from flowrt.subgraph import Subgraph

if TYPE_CHECKING:
    from collections.abc import Callable

BUCKETS, MOST_BUCKETS = 30, 1 << 16
MOST_IMAGES, ALL_IMAGES = 3, 1 << 31


@valueclass
class Summary:
    """By what `merged` names a tensor: its ``kind`` is scalar, histogram or image, ``most`` its buckets or images."""

    kind: str
    name: str
    most: int = 1


@brief
def scalar(name: str, value: Any) -> None:
    """Have the graph that is built tell ``value``, one number of each step, as ``name`` under the name's scope.

    In the function of a trainer's model it is a metric: `StepReport.metrics` has it.
    """
    _note(Summary("scalar", name), value, lambda dims: dims is None or dims == (), "one number, such as fr.mean(...)")


@brief
def histogram(name: str, value: Any, *, buckets: int = BUCKETS) -> None:
    """Have the graph that is built tell how the entries of ``value`` are distributed, such as a variable's.

    There are up to 65,536 ``buckets``.
    """
    entries = value.values if isinstance(value, IndexedSlices) else value
    _note(Summary("histogram", name, counted(buckets, "buckets", MOST_BUCKETS)), entries, lambda dims: True, "a tensor")


@brief
def image(name: str, value: Any, *, most: int = MOST_IMAGES) -> None:
    """Have the graph that is built tell the first ``most`` images of ``value``: [height, width, channels] or a batch.

    Of uint8, or floats from 0 to 1; with 1, 2, 3 or 4 channels (grey or RGB, without alpha or with it), or none and no
    such axis.
    """
    shapes = "[height, width], [height, width, channels] or [batch, height, width, channels]"
    told = Summary("image", name, counted(most, "most", ALL_IMAGES))
    _note(told, value, lambda dims: dims is None or 2 <= len(dims) <= 4, shapes)


@brief
def merged(graph: Graph) -> dict[Summary, Tensor]:
    """All that ``graph`` tells, to be fetched, alone or beside other things; `Writer.summaries` takes what came."""
    if not isinstance(graph, Graph):
        raise GraphError(f"{user_site()}: merged takes an fr.Graph, not {graph!r}")
    if not graph.summaries:
        raise GraphError(f"{user_site()}: the graph tells nothing; write fr.summary.scalar('loss', loss) in it")
    return dict(graph.summaries)


def counted(value: Any, what: str, most: int) -> int:
    """``value``, if it is a number from 1 to ``most``."""
    if not is_whole(value, 1) or value > most:
        raise GraphError(f"{user_site()}: {what} is a number from 1 to {most}, not {shortened(value)}")
    return int(value)


def _note(told: Summary, value: Any, fits: Callable[[Any], bool], expected: str) -> None:
    graph = current_graph(f"fr.summary.{told.kind}")
    if isinstance(graph, Subgraph):
        raise GraphError(f"{user_site()}: a loop or branch tells nothing; have it answer {told.name!r}, and tell that")
    if not isinstance(told.name, str) or not told.name:
        raise GraphError(f"{user_site()}: a summary has a name, not {told.name!r}")
    tensor = as_value(value)
    if not isinstance(tensor, Tensor) or tensor.graph is not graph:
        raise GraphError(
            f"{user_site()}: fr.summary.{told.kind} takes a tensor of this graph, not {value!r}; "
            f"of an array, use writer.{told.kind}"
        )
    if not fits(tensor.spec.dims):
        raise SpecError(f"{user_site()}: the {told.kind} {told.name!r} must be {expected}; got {tensor.spec}")
    named = Summary(told.kind, current_scope().prefix + told.name, told.most)
    if any(named.name == other.name for other in graph.summaries):
        raise GraphError(
            f"{user_site()}: the graph tells a summary {named.name!r} already; choose another name, or write it in "
            "`with fr.name_scope(...)`"
        )
    graph.summaries[named] = tensor
