"""What a trainer's replicas are told of a source that they read themselves, if that gives what they take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowrt.base.errors import FeedError
from flowrt.base.spec import agree
from flowrt.data.sources import Source, source_to_data
from flowrt.train.batches import check_names

if TYPE_CHECKING:
    from flowrt.base.errors import Site
    from flowrt.train.built import Built


def what_replicas_read(trainer: Built, source: Source) -> dict[str, Any]:
    """The fields of `BeginReplica` that say what replicas read. See `check_source` for errors."""
    inputs = trainer.towers[0].inputs
    placed = tuple((name, tensor.spec.dtype.name, tensor.spec.dims) for name, tensor in inputs.items())
    return {"source": source_to_data(source), "inputs": placed}


def check_source(trainer: Built, source: Source, site: Site) -> None:
    """Raise `FeedError` where ``source`` is known to give what is not fed to ``trainer``."""
    specs = source.specs
    if not specs:
        return
    check_names(specs, trainer.inputs, f"a batch of {source}")
    for name, expected in trainer.inputs.items():
        if specs[name].dtype != expected.dtype or not agree(specs[name].dims, expected.dims):
            fix = f"; dtypes={{{name!r}: {expected.dtype.name!r}}} converts it" if hasattr(source, "dtypes") else ""
            raise FeedError(f"{site}: {name!r} of {source}: expected {expected}, it gives {specs[name]}{fix}")
