"""NVIDIA's driver, and its libraries, which do some steps instead of twins: which ones, by which calls, and the calls.

Law: which calls a step comes to is decided by pure files, `products` and `convolutions`. Nothing here knows of Numba.
"""
