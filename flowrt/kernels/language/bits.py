"""What compilers see of floats of 16 bits: the bits, which the functions of an expression take and answer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flowrt.base.spec import stored

if TYPE_CHECKING:
    from flowrt.kernels.language.expression import Expression


def on_bits(expression: Expression) -> Expression:
    """The same expression with uint16 in the place of dtypes of 16 bits."""
    dtypes = tuple(map(stored, expression.dtypes))
    if dtypes == expression.dtypes:
        return expression
    count = len(expression.inputs)
    each = zip(expression.members, dtypes[count:], strict=True)
    members = tuple(replace(member, dtype=dtype) for member, dtype in each)
    return replace(expression, inputs=dtypes[:count], members=members)
