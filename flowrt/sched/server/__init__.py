"""A parameter server of a run, and what server 0 does beside it: coordinates, alone or for a client.

Law: see `runs`. It knows `drivers`, and obeys `versions`.
"""
