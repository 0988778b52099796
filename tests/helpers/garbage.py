"""Python's own functions of the garbage collector, which conftest.py replaces for the tests."""

from gc import freeze, unfreeze

__all__ = ["freeze", "unfreeze"]
