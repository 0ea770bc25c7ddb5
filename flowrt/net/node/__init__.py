"""The serving side of a task: what each master has on it, the steps in progress, and newcomers at its door.

Law: a node obeys and decides nothing about others. It knows the links between tasks, and no master's inside.
"""
