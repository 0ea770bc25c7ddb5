"""Register tiles, and what walks over matrices with them: packed panels, products, moved rows and squares.

Law: sizes and addresses, never a dtype or an op; the machine code is `emit`'s. It knows `language` and `store`.
"""
