"""``lightseq-bench huggingface``: trains and runs models of Hugging Face with their own Trainer,
with ``lightseq_fairseq.huggingface`` and without it.

`cases` has the systems and the modules that run them; `training` and `encoding` measure all in the
same way.
"""
