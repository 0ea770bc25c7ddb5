"""Nodes talking to nodes: frames, authenticated connections, and what travels over them.

Imports `sched` and floor 0; never sees a Graph, only a Plan.
"""
