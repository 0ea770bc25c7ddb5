"""Clusters: which tasks there are and where, how nodes are told so, and nodes as processes of this machine.

Law: it knows nothing of graphs and sessions; how nodes talk is the matter of `net`.
"""
