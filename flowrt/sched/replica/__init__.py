"""A replica of a run: goes from version to version as servers tell it of them.

Law: see `runs`. It knows `drivers`.
"""
