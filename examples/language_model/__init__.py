"""A small GPT on the source of Python's standard library."""
