"""One connection between two processes once it is let through: what waits to be written, what is read, shared memory.

Law: messages are moved and counted, none is interpreted; all that it uses is bounded. It knows `wire` alone.
"""
