"""Launches that hold others: loops, branches, several at once, a product and what follows it, loops of scalars.

Law: each is a block over the same bases, and the same bits as its parts one by one. It knows `language` and `store`.
"""
