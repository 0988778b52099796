"""What lightseq-generate and -interactive do around the search: output, samples, several GPUs."""
