"""What lightseq-bench measures, and how."""
