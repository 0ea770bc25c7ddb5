"""Models that are done: frozen, saved as one file, called in a program, and served over HTTP.

    model = await fr.serving.freeze(session, inputs={"images": x}, outputs={"scores": y})
    model.save("digits.flowrt")

Law: what is served computes and changes nothing: it has no variables, queues or optimisers, and is data alone, whose
every byte is checked before any of it is used. What is pure (`cut`, `signature`) knows no clock or socket.
"""

from flowrt.serving.freeze import freeze
from flowrt.serving.model import Model

__all__ = ["Model", "freeze"]
