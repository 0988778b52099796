"""A small RoBERTa that tells whether a German caption is the translation of an English one."""
