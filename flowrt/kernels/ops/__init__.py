"""The twins of `flowrt.ops`: what each op computes, in files of the same names, in the same order.

Law: a kernel is a function in its family's file, its CUDA twin right below. Families know what is below them
(`language`, `elementary`, `tiles`, `composite`, `launch`), nothing of fusion or of how code is emitted.
"""
