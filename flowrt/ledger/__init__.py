"""The ledger of a trainer: a file that says of every batch what became of it.

    async for report in trainer.steps(session, batches, ledger="run.ledger"):
        ...

    python -m flowrt.ledger run.ledger            # or fr.Ledger("run.ledger")

A batch's identity is its place, from 0, in the order in which the source is drawn, over all runs that share the file.
Each ends exactly once: kept, late, refused or lost; or it is unused, and still to be handed out. Where a session has
`Checkpoints`, its trainers' ledgers lie beside them, as ``<folder>/<trainer>.ledger``.

The file is only appended to. It begins with the 16 bytes ``flowrt ledger 1\\n``. A record is 12 bytes, three unsigned
32-bit numbers, little-endian: how many bytes its content has, the CRC-32 of the content, and the CRC-32 of the eight
bytes before; then the content: a MessagePack array of the record's kind, a number, and its fields as in `records`:

=  ============  ======================================================================================
0  `Setup`       whose batches these are: trainer, replicas, policy, servers, seed, …; again when that changes
1  `Begun`       a run began, at a version
2  `Handed`      a replica is about to be handed batches, of which the first has that number there
3  `Made`        a version was made: of each batch that was used, by whom and how that ended
4  `Returned`    batches came back of a replica that was lost before it began with them
5  `Undone`      variables went back to an older version; what had been kept since was lost, or is used again
6  `Missed`      versions were made of which nothing is known; what a run had not accounted for is lost
7  `Over`        a run is over; what it had not used is unused
8  `Packed`      how updates travel in the run that began last, where they are packed
=  ============  ======================================================================================

What a killed process or a power cut leaves of the last record, or zeros in its place, is passed over in reading, and
cut off in writing. Whatever else does not fit its checksums is refused, with its place. A record is handed to the
system before what it tells of is acted upon, so a killed client loses none; it is forced to the disk before every
checkpoint. One process at a time writes, which ``flock`` sees to. That who goes on with a long ledger need not take in
all of it, there is a summary beside it, ``<ledger>.summary``, which may be deleted: see `summary`.
"""

from flowrt.ledger.ledger import Ledger, Version

__all__ = ["Ledger", "Version"]
