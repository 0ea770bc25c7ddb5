"""What one entry of an elementwise op costs."""

CHEAP, SLOW, COSTLY = 1, 4, 16
"""What one entry costs, in additions or reads: an instruction or two; a division or a root; a long chain of them."""
