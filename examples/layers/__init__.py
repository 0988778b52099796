"""The layers as a library: a Transformer and its training loop in plain PyTorch style."""
