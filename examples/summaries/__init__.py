"""BART writes the first sentence of a docstring of Python's library from the rest."""
