"""How a connection comes about, on both sides, and who may have one: HTTP's head, TLS, tokens, the gate.

Law: of a stranger no more is read than a head and a proof, and nothing is decoded. It knows `wire` and `stream`.
"""
