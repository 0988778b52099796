"""``lightseq-bench train``: whole training runs, ours beside what else a user could set up.

corpus            sentence pairs as long and as frequent as WMT's, in fairseq's binary format
cases             what is trained, by which systems, with which commands
measured_trainer  runs lightseq-train in a process of its own and looks at its steps from outside
compiled          the baseline that is no fairseq: packed PyTorch under torch.compile
timeline          a profile, as time by part of the step
floor             the least time that the arithmetic and the bytes of a step take
rows              training logs and reports -> result rows -> the printed table
"""
