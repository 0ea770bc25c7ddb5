"""Elementary functions as plain arithmetic without branches, so that loops over them vectorise.

Law: scalar functions within stated bounds, which `tests/kernels/test_elementary.py` tries. It knows `language` alone.
"""
