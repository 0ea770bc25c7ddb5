"""Doing: what runs a plan. The pure step machine decides; the executor, its lanes and its effects obey.

Law: it never sees a graph, only a plan. Files here know the rooms, and no room but those of replicated training knows
them; rooms stand in the order of `tests/test_layers.py`; README.md says how steps run.
"""
