"""Messages to send, and the judge of whether they came as they were sent."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

WIDTHS = {"int": (8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (32, 64)}
DTYPES = ["bool", *(f"{kind}{bits}" for kind, widths in WIDTHS.items() for bits in widths)]

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=40)
    | st.binary(max_size=40)
)
shapes = st.lists(st.integers(0, 4), max_size=4)
arrays = st.builds(lambda dtype, shape: np.ones(shape, dtype), st.sampled_from(DTYPES), shapes)
messages = st.recursive(
    scalars | arrays,
    lambda inner: st.lists(inner, max_size=4).map(tuple) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


def same(left: Any, right: Any) -> bool:
    """Equality of messages in which arrays stand, types and dtypes included."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right) or (left != left and right != right)  # damage may make a NaN of a number
