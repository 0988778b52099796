"""The benchmarks of lightseq-bench."""
