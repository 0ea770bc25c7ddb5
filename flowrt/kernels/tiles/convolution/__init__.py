"""Convolutions on register tiles, forward and back.

Law: as of the room around it, which it alone builds on.
"""
