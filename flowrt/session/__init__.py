"""Sessions: where a graph meets what runs it; steps, feeds, the two runners, and checkpoints of a session.

Law: it joins meaning and doing, as all of the head does: it alone may import both columns. It knows no trainer.
"""
