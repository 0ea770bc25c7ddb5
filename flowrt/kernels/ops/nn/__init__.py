"""The twins of `flowrt.ops.nn` and `flowrt.ops.recurrent`: convolution, pooling, classes, recurrent layers.

Law: as of the room around it.
"""
