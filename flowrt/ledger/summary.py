"""What a ledger came to, in a file beside it: who goes on with a long one need not take in every record again.

Law: a summary is believed of the very bytes that it was made of alone, by their CRC-32. Where it is missing, or amiss
in any way, the whole ledger is read, so nothing is ever lost with it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np

from flowrt.base import codec
from flowrt.base.errors import FlowrtError
from flowrt.files import remove_drafts, replacing
from flowrt.ledger.account import OUTCOMES, Account
from flowrt.ledger.records import Setup, record_from_data, record_to_data

if TYPE_CHECKING:
    from pathlib import Path

EVERY = 1 << 19  # bytes of records from one summary to the next, which take some 0.3 s to be taken in
_MAGIC = b"flowrt summary 1\n"
_SUM = 4  # bytes of a CRC-32


def summary_of(ledger: Path) -> Path:
    """Where the summary of a ledger lies."""
    return ledger.with_name(ledger.name + ".summary")


def write_summary(ledger: Path, account: Account, end: int, checksum: int) -> None:
    """Keep what the first ``end`` bytes of a ledger came to, of which that is the CRC-32.

    Where it cannot be written, or the ledger has violations, it is as it was.
    """
    if account.violations or account.setup is None:
        return
    content = codec.pack(_data_of(account, end, checksum))
    with suppress(OSError):
        remove_drafts(summary_of(ledger))  # the ledger is locked: nobody else writes one
        with replacing(summary_of(ledger)) as file:
            file.writelines((_MAGIC, crc32(content).to_bytes(_SUM, "little"), content))


def read_summary(ledger: Path, data: bytes) -> tuple[Account, int]:
    """What a ledger that holds ``data`` came to, and up to which byte; of one without a summary, nothing, up to 0."""
    try:
        content = summary_of(ledger).read_bytes()
        told = memoryview(content)[len(_MAGIC) + _SUM :]
        if content[: len(_MAGIC)] == _MAGIC and _is_sum(content[len(_MAGIC) :][:_SUM], told):
            end, checksum, *fields = codec.unpack(told)
            if end <= len(data) and crc32(memoryview(data)[:end]) == checksum:
                return _account_of(*fields), end
    except (OSError, FlowrtError, TypeError, ValueError, LookupError):
        pass  # it is another version's, or was cut off
    return Account(), 0


def _is_sum(told: bytes, content: memoryview) -> bool:
    return int.from_bytes(told, "little") == crc32(content)


def _data_of(account: Account, end: int, checksum: int) -> tuple[Any, ...]:
    assert account.setup is not None
    held = tuple((identity, *place) for identity, place in account.held.items())
    outcomes = tuple((replica, OUTCOMES.index(out), count) for (replica, out), count in account.outcomes.items())
    states = np.frombuffer(bytes(account.states), np.uint8)
    return end, checksum, record_to_data(account.setup), account.run, account.version, held, outcomes, states


def _account_of(setup: Any, run: Any, version: Any, held: Any, outcomes: Any, states: Any) -> Account:
    account = Account()
    found = record_from_data(setup, "a summary")
    if not isinstance(found, Setup):
        raise TypeError(f"a summary begins with {type(found).__name__}")
    account.setup, account.run, account.version = found, run, version
    account.held = {identity: (replica, number) for identity, replica, number in held}
    account.numbered = {place: identity for identity, place in account.held.items()}
    account.outcomes.update({(replica, OUTCOMES[code]): count for replica, code, count in outcomes})
    account.states = bytearray(states)
    return account
