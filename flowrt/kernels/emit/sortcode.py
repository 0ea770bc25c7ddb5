"""The machine code of what `flowrt.kernels.tiles.networks` names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from llvmlite import ir

if TYPE_CHECKING:
    from flowrt.kernels.emit.vectors import VectorCode
    from flowrt.kernels.tiles.micro import Stub

_WORD = ir.IntType(64)


def _exchange(code: VectorCode, stub: Stub, words: Sequence[Any]) -> None:
    one, other, count, beside = words
    builder, line = code.builder, ir.Constant(_WORD, stub.width)
    with code.steps(count, [one, other], [line, line]) as lines:
        places = [code.pointer(address) for address in lines]
        first, second = map(code.load, places)
        later = builder.icmp_signed(">", first, second)
        pairs = [(places, first, second)]
        if stub.rows > 1:
            places = [code.pointer(builder.add(address, beside)) for address in lines]
            third, fourth = map(code.load, places)
            tied = builder.icmp_signed("==", first, second)
            later = builder.or_(later, builder.and_(tied, builder.icmp_signed(">", third, fourth)))
            pairs.append((places, third, fourth))
        for places, low, high in pairs:
            code.store(builder.select(later, high, low), places[0])
            code.store(builder.select(later, low, high), places[1])


SORT_EMITTERS: dict[str, tuple[int, Callable[..., None]]] = {"exchange": (4, _exchange)}
"""With how many words each takes."""
