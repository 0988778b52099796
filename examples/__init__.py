"""Recipes of whole trainings; their Python runs from the root: `python -m examples.curves`."""
