"""A session's timeline: what its processes note of their steps, brought to one clock and written for Perfetto.

Law: who is traced decides nothing of it, and what is lost on the way is counted or named in the file, which is whole
however the tracing ends.
"""
