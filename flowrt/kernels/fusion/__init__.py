"""Programs of several ops as one launch: their shapes, rows and cuts, and what is worth it.

Law: plans as plain data; each result is what the members would come to one after another. It knows what `ops` knows,
and `ops`; nothing of how code is emitted.
"""
