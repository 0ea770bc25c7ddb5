"""Compiled code: kept on disk by content, put together, loaded, built beside the program.

Law: an object is bytes under a symbol that tells all that decides them; this room knows no op and no kernel's inside.
It imports nothing of `flowrt.kernels` but itself; what makes an object is imported when it must be made.
"""
