"""Kernels: what computes, on CPUs and CUDA devices, behind one ABI."""
