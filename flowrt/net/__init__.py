"""Nodes talking to nodes: `wire`, `stream`, `door`, then the links between tasks, and their two ends, `node`, `master`.

Law: it moves plans and tensors and never sees a Graph; each room imports those before it. It knows `sched` and floor 0.
"""
