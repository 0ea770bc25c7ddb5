"""A model that is done: a graph without state, and the names of what it takes and answers."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any

from flowrt.base.errors import ClosedError, FeedError, GraphError, user_site
from flowrt.base.locating import fitting
from flowrt.base.telling import telling
from flowrt.base.tracebacks import brief
from flowrt.serving import files
from flowrt.serving.signature import Frozen, check_name, told
from flowrt.session.blocking import BlockingSession

if TYPE_CHECKING:
    from os import PathLike


@brief
class Model:
    """What `freeze` makes and `load` reads: ``graph``, and tensors of it by name, ``inputs`` and ``outputs``.

    In a program: ``with model: model(images=array)`` answers a dict of arrays, from any thread. ``version`` names the
    content of the file that it was read from, or written to; it is empty until then.
    """

    def __init__(self, frozen: Frozen, version: str = "") -> None:
        check_name(frozen.name, "a model")
        frozen.graph.finalize()
        self.graph, self.name, self.version = frozen.graph, frozen.name, version
        self.inputs, self.outputs = MappingProxyType(frozen.inputs), MappingProxyType(frozen.outputs)
        self._frozen = frozen
        self._session: BlockingSession | None = None
        self._step: Callable[..., Any] | None = None

    @telling
    def __repr__(self) -> str:
        return f"Model {self.name!r} from ({told(self.inputs)}) to ({told(self.outputs)})"

    @fitting
    def save(self, path: str | PathLike[str]) -> None:
        """Write the model as one file, which is there whole or not at all, and outlasts a power cut.

        A file of that name is replaced; who serves it goes on with the one that it has read. It is a safetensors file:
        weights are found in it by their names.
        """
        self.version = files.write(self._frozen, path)

    @staticmethod
    @fitting
    def load(path: str | PathLike[str]) -> Model:
        """The model in a file that `save` wrote, once every byte of it was seen to be what was written.

        Nothing in it is code. Raises `BrokenStream` for what is no such file, or is damaged, and `OSError`.
        """
        return Model(*files.read(path))

    def __enter__(self) -> Model:
        if self._session is not None:
            raise ClosedError(f"{user_site()}: the model is open already; threads may share it")
        session = BlockingSession(self.graph)
        session.__enter__()
        self._session, self._step = session, session.compile(dict(self.outputs), list(self.inputs.values()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        session, self._session, self._step = self._session, None, None
        if session is not None:
            session.__exit__(kind, error, trace)

    def __call__(self, /, *unnamed: Any, **values: Any) -> dict[str, Any]:
        """The outputs by name for inputs by name. Raises `FeedError` for what does not fit, or is missing."""
        if self._step is None:
            raise ClosedError(f"{user_site()}: open the model first: `with model: model(...)`")
        if unnamed or values.keys() != self.inputs.keys():
            others = f" and {len(unnamed)} without a name" if unnamed else ""
            takes = f"the model takes ({told(self.inputs)})"
            raise FeedError(f"{user_site()}: {takes}, and was given {sorted(values)}{others}")
        answers: dict[str, Any] = self._step(*[values[name] for name in self.inputs])
        return answers


def checked(model: Any) -> Model:
    """``model``, if it is one; raises `GraphError`."""
    if isinstance(model, Model):
        return model
    raise GraphError(f"{user_site()}: that is no model, but {model!r:.200}; fr.serving.freeze makes one")
