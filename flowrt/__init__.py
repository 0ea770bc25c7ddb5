"""flowrt: a dataflow runtime for machine learning on asyncio and Numba."""
