"""What both sides serve: networks of dense layers, relu between them and softmax at the end. Needs NumPy alone."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

SIZES = {"small": (784, 256, 10), "large": (784, 2048, 2048, 10)}
LENGTH = "Inference-Header-Content-Length"


@cache  # answers are compared with what they should be, of every client
def weights(case: str) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    sizes = SIZES[case]
    return [(rng.normal(size=(rows, columns)) / np.sqrt(rows)).astype("float32") for rows, columns in pairwise(sizes)]


def rows(count: int = 1) -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).normal(size=(count, 784)).astype("float32")


def expected(case: str, given: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    *hidden, last = weights(case)
    for matrix in hidden:
        given = np.maximum(given @ matrix, 0)
    powers = np.exp(given @ last)
    return powers / powers.sum(axis=1, keepdims=True)


def request(given: np.ndarray[Any, Any]) -> bytes:
    """One of HTTP, with a row as bytes, which asks for bytes."""
    tensor = {"name": "x", "shape": list(given.shape), "datatype": "FP32"}
    tensor["parameters"] = {"binary_data_size": given.nbytes}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    lines = [
        "POST /v2/models/m/infer HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/octet-stream",
        f"{LENGTH}: {len(head)}",
        f"Content-Length: {len(head) + given.nbytes}",
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + head + given.tobytes()
