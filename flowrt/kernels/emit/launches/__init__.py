"""The machine code of what runs launches: tapes, direct calls, loops and branches, loops of scalars.

Law: as of the room around it.
"""
