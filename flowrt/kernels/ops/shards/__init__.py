"""The twins of `flowrt.ops.routing` and `flowrt.ops.parts`: rows of tables that lie in several parts.

Law: as of the room around it.
"""
