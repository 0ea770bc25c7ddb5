"""What is said, as bytes: frames of a header and arrays, each kind of message, and the proofs that come before any.

Law: pure; what is read is checked against hard limits before it is believed. It knows nothing of who says it, and when.
"""
