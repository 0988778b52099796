"""Recipes for complete trainings. Run their Python modules from the root of the repository, as in
`python -m examples.curves`.
"""
