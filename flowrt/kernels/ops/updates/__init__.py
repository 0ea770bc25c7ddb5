"""What replicas and servers do with updates, between one's plan and the other's: sums of a set, and fewer bytes.

Law: as of the room around it; no op has these kernels.
"""
