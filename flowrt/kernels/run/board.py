"""Where the threads that share tapes find what: positions of int64 words, for those who write them and for the loops.

Law: names alone. A *board* is a crew's own memory and lives as long as its threads. It has slots, one for each tape
that is being shared; a slot's ticket says how many chunks were offered and how many taken. All else of a run lies with
its *share*, which may be gone as soon as the run is over: so nobody looks at it but who holds a chunk of that run.
"""

from __future__ import annotations

# The board. What changes has a cache line of its own.
READ_END, WRITE_END, THREADS, SLOTS, PATIENCE = range(5)  # a pipe's two ends; the crew's size; nanoseconds
CLOSED, ASLEEP, CALLERS = 16, 32, 48
BYTES = 64  # 64 words that the pipe's bytes come from and go to
SLOT, SLOT_WORDS = 128, 16  # the first slot, and the words of each:
TICKET, SHARE, TAKEN = range(3)  # the last: whether a run has it
BOARD_ALIGNMENT = 128

# A ticket: counts of chunks taken (lowest), offered, and of the runs that had the slot (highest).
COUNT_BITS = 20
COUNT_MASK, RUN_MASK = (1 << COUNT_BITS) - 1, (1 << 23) - 1

# A share: what stays for all runs, the counters of one run, then for each task how many tasks it still waits for, how
# many of its chunks are left and which were begun, then the tasks of the chunks offered in their order, then the other
# threads' words and bases.
NODES, TASKS, TASK_COUNT, FOLLOWERS, CHUNKS, TIMES, ROW, ROW_WORDS, ROWS, LOCAL, LOCAL_BYTES = range(11)
BOARD, ITERATIONS, SPAN = 11, 12, 13  # of a loop: the crew's board, how many there were, two words as of a tape
STAMPS = 15  # where what each thread ran and when is written down; 0 where it is not, as mostly
FINISHED, OWN, FAILED, COUNTERS_END = 16, 17, 32, 48  # OWN: 1 + the task that is the caller's to run now
WAITS, LEFT, BEGUN, TASK_COUNTERS = range(4)  # of so many words for each task

# A task: its launches, its chunks, its followers (positions in their list) and how many tasks it waits for.
# One that is the caller's own, a loop whose iterations are shared in their turn, is offered to nobody else.
TASK_FIRST, TASK_STOP, TASK_CHUNKS, FOLLOWERS_FROM, FOLLOWERS_STOP, TASK_WAITS, TASK_OWN, TASK_WORDS = range(8)

# Stamps: how many were wanted, how many there is room for, then of each: its launch, whose words it ran with, and
# nanoseconds.
STAMPED, MOST_STAMPS, FIRST_STAMP = range(3)
STAMP_LAUNCH, STAMP_WORDS, STAMP_BEGAN, STAMP_ENDED, STAMP_FIELDS = range(5)

NODE_WORDS = 3  # of a launch: entry, block, units
LOCAL_BASE = 2  # the slot of ``bases`` that is each thread's own
NOTHING_FAILED = 2**63 - 1
STATUS_BITS = 32  # what failed: the launch above these bits, its status in them; the lowest counts

ALIGNED_UNITS = 64  # chunks of many units begin at multiples of this, as the vectors inside do
EVEN_UNITS = 1024  # a chunk's units from which that matters no more
MOST_PLACES = 62  # chunks of a task up to which each has a bit
