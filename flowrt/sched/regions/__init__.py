"""Regions of a plan before they are recorded: which nodes, whose memory they share, how long values live.

Law: pure; a region follows from the plan and its inputs' shapes alone. It knows `host` alone.
"""
