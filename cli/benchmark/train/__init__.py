"""``lightseq-bench train``: whole training runs of this package and of alternative systems.

corpus            sentence pairs and running text with natural lengths and word frequencies, in
                  fairseq's format
cases             cases, systems, and the commands that run them
measured_trainer  runs lightseq-train in its own process and measures its steps
compiled          the baselines without fairseq's training, under torch.compile
batches           the batches of the baselines
packed_transformer  the models of the baseline in plain PyTorch, without pads
hugging_face      RoBERTa of Hugging Face transformers
masked_batches    batches of masked text for the baselines
timeline          time per part of the step, from a profile
floor             lower bound of the step time, from its arithmetic and its memory traffic
rows              training logs and reports -> result rows -> the printed table
"""
