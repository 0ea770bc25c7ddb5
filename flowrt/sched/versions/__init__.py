"""Versions of a trainer's variables: which updates make one, whose batch is whose, exactly once on every server.

Law: pure, immutable values; an event answers a new value and a verdict. It knows `policies` alone.
"""
