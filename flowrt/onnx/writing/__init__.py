"""How flowrt's ops are said in ONNX: a function for each, by families, and who goes through a graph with them.

Law: a function here adds nodes that compute the same, of ONNX's default operators of `flowrt.onnx.saving.OPSET`, or
raises `Unwritable`. `never` lists the ops that are not written, and why: each op is in one of the two tables.
"""

from flowrt.onnx.writing import control, elementwise, layers, moving, never, reductions

__all__ = ["control", "elementwise", "layers", "moving", "never", "reductions"]
