"""Multi30k English-German. Run its Python modules from the root of the repository."""
