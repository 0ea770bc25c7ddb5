"""What computes on NVIDIA's GPUs: twins compiled by numba-cuda, and a GPU, or Numba's simulator of one, as a device.

Law: the only room beside `emit` that imports Numba, and loaded only where there is a GPU or one is simulated; `present`
tells that without any package. NVIDIA's driver and libraries are called by `nvidia`.
"""
