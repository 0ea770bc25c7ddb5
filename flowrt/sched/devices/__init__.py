"""The devices of a task: what somebody writes who has another, and what the scheduler makes of it.

Law: above this room nobody asks which device it is. A `Kind` finds and opens devices; a `Driver` is one of them, as
whoever knows it writes it: memory, copies and kernels, in one thread. A `Device` is what a host has of it: that driver
behind a lane, with its memory counted. The host's own, whose memory is where feeds, fetches, queues and tapes are, is
one, too.
"""
