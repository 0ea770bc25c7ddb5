"""The standard kernels, and the command line that compiles them: ``python -m flowrt.standard build``.

Law: of the head, above all that a program may name; nothing imports it but who builds.
"""
