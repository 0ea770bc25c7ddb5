"""How this process becomes one of Ray's drivers, or hears why it does not.

Law: Ray itself tries for minutes to reach what is not there. So whether anybody listens at an address is found out
before, in a time that the caller says, and can be interrupted. One that listens and refuses Ray tries for 20 seconds:
in another thread, as the event loop has others to serve.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from typing import Any

from flowrt.base.errors import GraphError, ResourceError, user_site
from flowrt.cluster.cluster import parse_address
from flowrt.finishing import to_the_end
from flowrt.net.door.addresses import UNREACHABLE
from flowrt.net.door.connecting import reason
from flowrt.progress import Activity

AGAIN = 0.5  # seconds between two tries to reach Ray, which may be about to start
_CLIENT = "ray://"
_TOKEN = "if it wants a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH, here, too"


async def connect_to_ray(ray: Any, address: str | None, seconds: float) -> None:
    """Call `ray.init`, once somebody listens at ``address``, or at RAY_ADDRESS, where those name a port.

    Raises `ResourceError` where nobody does within ``seconds``, or who does will not have this process.
    """
    where = address or os.environ.get("RAY_ADDRESS", "")
    place = _place(where)
    if place is not None:
        await _wait_listens(where, place, seconds)
    try:
        if place is None:  # what Ray then starts, a signal has to end: of that it hears in the main thread alone
            _init(ray, address)
        else:
            logging.getLogger("ray._private.worker").addFilter(_is_for_users)
            await to_the_end(asyncio.to_thread(_init, ray, address))
    except asyncio.CancelledError:
        ray.shutdown()
        raise
    except ray.exceptions.RayError as error:  # which says what is amiss here, as that there is no token
        raise ResourceError(f"{user_site()}: {error}") from error
    except ConnectionError as error:
        if place is None:
            raise ResourceError(f"{user_site()}: no Ray answers at {where}: {error}") from error
        raise ResourceError(
            f"{user_site()}: what listens at {where} is no Ray, or does not let this process in: {error}; {_TOKEN}"
        ) from error


def _init(ray: Any, address: str | None) -> None:
    ray.init(address=address, logging_level=logging.WARNING)


def _is_for_users(record: logging.LogRecord) -> bool:
    """Not that Ray hears of no signals in a thread."""
    return "SIGTERM handler" not in record.getMessage()


def _place(where: str) -> tuple[str, int] | None:
    """The host and port that an address of Ray's names, where it names one."""
    with suppress(GraphError):
        return parse_address(where.removeprefix(_CLIENT))
    return None


async def _wait_listens(where: str, place: tuple[str, int], seconds: float) -> None:
    why = ""

    def look(activity: Activity) -> None:
        activity.left = why

    try:
        with Activity(f"waiting for Ray at {where}", look=look):
            async with asyncio.timeout(seconds):
                while True:
                    try:
                        _, writer = await asyncio.open_connection(*place)
                    except UNREACHABLE as error:
                        why = reason(error)
                        await asyncio.sleep(AGAIN)
                    else:
                        writer.close()
                        return
    except TimeoutError as error:
        raise ResourceError(
            f"{user_site()}: no Ray answers at {where} within {seconds:g} s{why and f': {why}'}; start one by "
            "`ray start --head`, or leave out address= and RAY_ADDRESS for one of this program's own"
        ) from error
