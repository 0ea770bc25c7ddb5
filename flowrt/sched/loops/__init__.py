"""Loops and branches: on concrete shapes as one launch, as one kernel of scalars, or one node at a time.

Law: a body is a plan, and means the same whichever way it runs. It knows `host` and `regions`.
"""
