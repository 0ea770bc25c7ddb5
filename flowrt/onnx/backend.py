"""flowrt as a backend of ONNX: what tools, and ONNX's own tests, run models by (``onnx.backend.base``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flowrt.onnx.files import model_from
from flowrt.onnx.loading import LoadedModel, NotReadable, load
from flowrt.session.blocking import BlockingSession


class PreparedModel:
    """A model that can be run. Inputs that sizes or axes hang on are part of its graph, built for their values."""

    def __init__(self, model: Any) -> None:
        self._model = model
        weights = {tensor.name for tensor in model.graph.initializer}
        self._names = [value.name for value in model.graph.input if value.name not in weights]
        self.fixed: frozenset[str] = frozenset()
        self._loaded: LoadedModel | None = None
        try:
            self._loaded = load(model)
        except NotReadable as error:
            if not error.wanted:
                raise
            self.fixed = error.wanted

    def run(self, inputs: Sequence[Any] | Mapping[str, Any], **kwargs: Any) -> tuple[Any, ...]:
        """The outputs for inputs in order, or by name."""
        named = dict(inputs) if isinstance(inputs, Mapping) else dict(zip(self._names, inputs, strict=False))
        arrays = {name: np.asarray(value) for name, value in named.items()}
        loaded = self._loaded
        while loaded is None:
            try:
                loaded = load(self._model, {name: arrays[name] for name in self.fixed})
            except NotReadable as error:
                if error.wanted <= self.fixed:
                    raise
                self.fixed |= error.wanted
        with BlockingSession(loaded.graph) as session:
            feeds = {loaded.inputs[name]: array for name, array in arrays.items() if name in loaded.inputs}
            return tuple(session.run(list(loaded.outputs.values()), feeds))


class FlowrtBackend:
    """What ONNX calls a backend."""

    @classmethod
    def is_compatible(cls, model: Any, device: str = "CPU", **kwargs: Any) -> bool:
        """Whether it is a model that can be read."""
        try:
            PreparedModel(model_from(model))
        except NotReadable:
            return False
        return cls.supports_device(device)

    @classmethod
    def prepare(cls, model: Any, device: str = "CPU", **kwargs: Any) -> PreparedModel:
        """``model``, ready to run; raises `GraphError` where it cannot be read."""
        return PreparedModel(model_from(model))

    @classmethod
    def run_model(cls, model: Any, inputs: Any, device: str = "CPU", **kwargs: Any) -> tuple[Any, ...]:
        """The outputs of ``model`` for ``inputs``."""
        return cls.prepare(model, device).run(inputs)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Whether models run there: on the processor."""
        return device.partition(":")[0] == "CPU"


prepare = FlowrtBackend.prepare
run_model = FlowrtBackend.run_model
is_compatible = FlowrtBackend.is_compatible
supports_device = FlowrtBackend.supports_device
