"""Multi30k English-German; its Python runs from the root."""
