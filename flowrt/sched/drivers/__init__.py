"""What all drivers of a run have in common: what they say to one another, how they post, compute and keep.

Law: see `runs`. It knows nothing of replicas and servers.
"""
