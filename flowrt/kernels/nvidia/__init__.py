"""What NVIDIA's libraries do instead of twins: which steps, by which calls, and the calls themselves.

Law: which calls a step comes to is decided by pure files, `products` and `convolutions`. Nothing here knows of Numba.
"""
