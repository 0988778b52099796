"""Translating with a trained model.

memory       what steps leave to later ones, at places that never change
decoder      one step of all hypotheses, from ops alone, and its CUDA graphs
search       our own search: beam search, diverse beam search, sampling
results      what it has found, and what the host gets of it
late         how far the search has come, as the host learns it
weights      whether the parameters are still where graphs read them
incremental  the same steps under a search of fairseq's
"""
