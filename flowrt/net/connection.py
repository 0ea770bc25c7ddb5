"""One framed stream between two nodes, once the door (`flowrt.net.transport`) let it through.

Law: memory is bounded at both ends. A sender writes slices, and the next only when the kernel has taken the last, so
nothing is buffered here and what `Connection.send` was given may change once it returns. A receiver whose inbox is full
stops reading, which in time stops the sender. Frames never interleave, and never end in the middle while the connection
lives: a cancelled send finishes its frame, or the connection goes. Nothing here interprets a message.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from flowrt.codec import FRAME, Limits, Message
from flowrt.errors import BrokenStream, ClosedError, FlowrtError, InternalError, NodeLost
from flowrt.net.frames import GOODBYE, Allocate, FrameReader, Piece, allocate_array, frame, writes

if TYPE_CHECKING:
    from types import TracebackType


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one connection may use; times in seconds."""

    limits: Limits = FRAME
    inbox_messages: int = 256  # received and not yet taken; then reading stops
    inbox_bytes: int = 16 << 20
    slice_bytes: int = 4 << 20  # written at once; less, and a large array waits for this side as well as for the wire
