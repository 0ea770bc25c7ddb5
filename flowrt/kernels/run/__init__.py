"""Running what is compiled: a step or an op as one call of Python's, the board that threads share, BLAS's pools.

Law: nothing is decided here but what a call may take. It knows `launch`, `language` and `store`.
"""
