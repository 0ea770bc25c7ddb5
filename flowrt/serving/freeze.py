"""From a session to a model: its variables, as they are between two steps, become constants."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any, overload

from flowrt.base.errors import GraphError, user_site
from flowrt.base.locating import fitting
from flowrt.base.tracebacks import brief
from flowrt.graph import Tensor
from flowrt.op import as_value
from flowrt.serving.cut import CutOut
from flowrt.serving.model import Model
from flowrt.serving.signature import named
from flowrt.session.blocking import BlockingSession
from flowrt.session.session import Session


@overload
def freeze(
    session: Session,
    inputs: Any,
    outputs: Any,
    *,
    given: Mapping[Any, Any] | None = None,
    name: str = "model",
    quantize: str | None = None,
) -> Coroutine[Any, Any, Model]: ...


@overload
def freeze(
    session: BlockingSession,
    inputs: Any,
    outputs: Any,
    *,
    given: Mapping[Any, Any] | None = None,
    name: str = "model",
    quantize: str | None = None,
) -> Model: ...


@fitting
def freeze(
    session: Any,
    inputs: Any,
    outputs: Any,
    *,
    given: Mapping[Any, Any] | None = None,
    name: str = "model",
    quantize: str | None = None,
) -> Any:
    """The model that computes ``outputs`` from ``inputs``, mappings of names to tensors; to be awaited of a `Session`.

    Its graph has what the outputs need and no more. Variables are constants, all read between the same two steps, and
    so is what is computed of nothing but them, where it takes no more memory; ``given`` are tensors with one value for
    good, as ``{training: False}``. Placeholders keep their names; devices are forgotten. Of a checkpoint: open the
    session with ``checkpoints=``. It is no step of the program: no later draw differs for it.
    ``quantize="int8"``: float32 weights that rows are multiplied with take a quarter of the memory, and products less
    time; each column of a weight and each row has a scale of its own, and answers differ by about a hundredth.
    Raises `GraphError` where the outputs write a variable, wait for a queue, or need a placeholder that is no input.
    """
    kinds = Session, BlockingSession
    if not isinstance(session, kinds):
        raise GraphError(f"{user_site()}: freeze takes the session that holds the variables, got {session!r:.200}")
    fed = _given(given)
    takes, answers = named(inputs, "inputs"), named(outputs, "outputs")
    if not answers:
        raise GraphError(f"{user_site()}: a model without outputs computes nothing; name some, as {{'scores': y}}")
    if quantize not in (None, "int8"):
        raise GraphError(f"{user_site()}: quantize is 'int8', or None, got {quantize!r:.200}")
    cut = CutOut(takes, answers, list(fed), quantize == "int8")
    if isinstance(session, BlockingSession):
        return session._call(_frozen(session._session, cut, fed, name))
    return _frozen(session, cut, fed, name)


def _given(values: Any) -> dict[Tensor, Any]:
    """The values by tensor."""
    if values is not None and not isinstance(values, Mapping):
        raise GraphError(f"{user_site()}: given is {{tensor: value}}, got {values!r:.200}")
    found = {as_value(tensor): value for tensor, value in (values or {}).items()}
    for tensor in found:
        if not isinstance(tensor, Tensor):
            raise GraphError(f"{user_site()}: given has values of tensors, as {{training: False}}, got {tensor!r:.200}")
    return found


@brief
async def _frozen(session: Session, cut: CutOut, given: Mapping[Tensor, Any], name: str) -> Model:
    values = await session.run_uncounted(cut.constants, given) if cut.constants else []
    return Model(cut.built(values, name))
