"""Decoding one token at a time."""
