"""Sources of batches that can be read anywhere: frozen values, of which a worker makes any batch by its identity.

    source = fr.data.npz("digits.npz", batch=32, epochs=10)
    source.batches_per_epoch, source.total, source.specs
    source.batch(7)                                       # the batch of that identity, anywhere the same
    async for report in trainer.steps(session, source):   # workers read it themselves

See `order` for which rows make which batch, `sources.Source` for what a source is.
"""

from typing import TYPE_CHECKING

from flowrt.base.familiar import answering
from flowrt.data.array_files import arrays, npy, npz
from flowrt.data.functions import function, source
from flowrt.data.parquet_files import parquet
from flowrt.data.sources import Reading, Source, Table

__all__ = ["Reading", "Source", "Table", "arrays", "function", "npy", "npz", "parquet", "source"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = answering("fr.data", globals())
