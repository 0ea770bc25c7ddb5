"""Summaries: what training comes to, written while it goes on, for TensorBoard to show.

    with fr.summary.Writer("runs/1") as writer:
        async for report in trainer.steps(session, batches):
            writer.report(report)

    tensorboard --logdir runs

What a graph computes is told by `scalar`, `histogram` and `image` where it is built, and fetched as `merged(graph)`.

Law: nothing here is loaded before it is asked for, and TensorBoard's package only by who opens a `Writer`. Whoever
tells a value does no more than note it: a thread of the writer's makes what is written of it, and writes it. What goes
wrong there ends no training. The thread knows a graph, a report and arrays; no session, and no loop.
"""

from flowrt.summary.told import Summary, histogram, image, merged, scalar
from flowrt.summary.writer import Writer

__all__ = ["Summary", "Writer", "histogram", "image", "merged", "scalar"]
