"""Build, checks and table making, run from the root: `python -m scripts.tables`."""
