"""What happens between a fairseq batch and an updated model.

    batch         sentence pairs -> packed batches
    full_batches  --pack-tokens: batches filled by real tokens
    objectives    packed batch, model -> losses, and what is logged
    step          packed tokens -> gradients -> update, as CUDA graphs
    flat_adam     flat gradient -> flat parameters
    fast_path     the step in fairseq's training loop; what takes fairseq's own instead
    trainer       fairseq's training loop around them, and what it leaves on disk
    host_copies   a training state, copied to the host's memory
    background    checkpoints are written from it while training goes on
    stopping      signals that end training with a checkpoint
    process       what surrounds fairseq's training in each process
    ranks         what ranks tell of each other

batch, objectives, step, flat_adam and ranks import torch and no fairseq.
"""
