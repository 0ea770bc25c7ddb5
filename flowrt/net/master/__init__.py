"""The driving side: the tasks that a master meets, listens to and reaches again, and the steps that it has them run.

Law: who is alive, suspected or lost is decided here alone, by values that are told the time.
"""
