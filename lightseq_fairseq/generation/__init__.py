"""Translating with a trained model.

memory       what steps leave to later ones, at places that never change
decoder      one step of all hypotheses, from ops alone, and its CUDA graphs
search       our own search: beam search, diverse beam search, sampling
incremental  the same steps under a search of fairseq's
"""
