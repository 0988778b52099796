"""Code of lightseq-generate and -interactive around the search: output, samples, several GPUs."""
