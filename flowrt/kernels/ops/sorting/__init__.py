"""The twins of `flowrt.ops.sorting`: entries in order, the first ones, where others belong, and where a mask is true.

Law: as of the room around it.
"""
