"""Models that are done: frozen, saved as one file, called in a program, and served over HTTP.

    model = await fr.serving.freeze(session, inputs={"images": x}, outputs={"scores": y})
    model.save("digits.flowrt")

    async with fr.serving.ModelServer("digits.flowrt") as server: ...

Law: what is served computes and changes nothing: it has no variables, queues or optimisers, and is data alone, whose
every byte is checked before any of it is used. What is asked is bounded where it comes in: it waits in one queue, is
answered once, or refused at once. Whatever decides (`cut`, `batching`, `joining`, `protocol`) is pure.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

from flowrt.serving.batching import Batching
from flowrt.serving.freeze import freeze
from flowrt.serving.model import Model

if TYPE_CHECKING:
    from flowrt.serving.server import ModelServer
else:

    def __getattr__(name: str) -> _Any:
        if name != "ModelServer":
            raise AttributeError(f"fr.serving has no {name!r}; it has {', '.join(__all__)}")
        return _import_module("flowrt.serving.server").ModelServer  # which needs a server of HTTP


__all__ = ["Batching", "Model", "ModelServer", "freeze"]
