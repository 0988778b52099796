"""``lightseq-bench generate``: translates test sets, continues prompts by language models, and
computes features by RoBERTa, with this package and alternative systems.

`cases` has the systems and the modules that run them; `stopwatch` measures all in the same way.
"""
