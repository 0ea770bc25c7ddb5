"""Checkpoints as they lie in a folder or a bucket: shards that anybody's safetensors reads, and a manifest over them.

A checkpoint is a folder ``save-00000007-step-000000000120`` (saves are numbered, so none replaces another). It holds
shards, one for each task that had variables, and ``manifest.json``, which is written last: without it there is no
checkpoint. Names of variables are data in both, never paths.
"""
