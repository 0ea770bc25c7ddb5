"""What everything stands on: errors, specs, devices, plain data, the plan, messages as bytes.

Law: no op, no graph, no kernel. Files stand in the order of `tests/test_layers.py`, each on those before it alone.
"""
