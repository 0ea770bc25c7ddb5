"""What a kernel is: how one is written and registered, and scalar functions put together of others.

Law: facts and plain data; nothing is compiled, planned or run here. It knows `store` alone.
"""
