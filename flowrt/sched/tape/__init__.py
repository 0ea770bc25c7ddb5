"""Tapes: a region whose shapes are known, as launches in a fixed order, and how threads share them.

Law: a tape is immutable once recorded, and the same bits on any number of threads. It knows `host`, `regions`, `loops`.
"""
