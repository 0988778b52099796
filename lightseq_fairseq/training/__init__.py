"""What happens between a fairseq batch and an updated model.

    batch      padded batch -> packed tokens
    flat_adam  flat gradient -> flat parameters
    trainer    fairseq's training loop around them, and what it leaves on disk

The first two import torch and no fairseq.
"""
