"""From plans and Python functions to machine code.

Law: the only room that imports Numba or llvmlite, and imported only where something must be compiled. It may know all
rooms; none knows it but by the names of its modules.
"""
