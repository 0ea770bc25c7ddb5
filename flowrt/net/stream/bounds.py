"""What a connection may use, of memory and of time, and what it shares with others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrt.base.codec import FRAME, Limits
from flowrt.base.valueclass import valueclass
from flowrt.net.wire.frames import allocate_array

if TYPE_CHECKING:
    from flowrt.base.codec import Allocate
    from flowrt.net.stream.local import Local


@valueclass
class Bounds:
    """What one connection may use; times in seconds."""

    limits: Limits = FRAME
    inbox_messages: int = 256  # received and not yet taken; then reading stops
    inbox_bytes: int = 16 << 20
    outbox_messages: int = 1 << 14  # posted to a peer that does not read; then it is cut off
    slice_bytes: int = 4 << 20  # written at once; less, and a large array waits for this side too
    socket_bytes: int | None = None  # the kernel's buffers, each way; None lets it tune them
    silence: float = 5.0  # the peer's kernel answers nothing: then it is lost
    unacknowledged: float = 30.0  # the peer's kernel has no room: then it is lost
    stall: float = 10.0  # a frame that was begun must go on
    grace: float = 2.0  # for a frame and a goodbye in progress when a connection closes


@valueclass
class Means:
    """What connections of one side are made with: bounds, memory for what comes, and what others of its host see."""

    bounds: Bounds = Bounds()
    allocate: Allocate = allocate_array
    local: Local | None = None
