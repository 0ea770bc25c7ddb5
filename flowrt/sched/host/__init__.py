"""One task: the devices that it computes on, and the state that outlives its steps and sessions.

Law: whoever takes gives back, and what is held is counted to the byte. It knows kernels, and nothing of a plan.
"""
