"""Other engines behind the front end of ``lightseq-serve``, for ``scripts.bench_serve``."""
