"""Training: from a fairseq batch to an updated model.

    batch         dataset items -> packed batches
    full_batches  --pack-tokens: batches filled by real tokens, without counting pads
    objectives    packed batch, model -> losses, and the sums that are logged
    step          packed batch -> gradients -> update, as CUDA graphs
    exchange      collectives of gradients and parameters between ranks, in pieces
    adam_state    moments and step counts of flat parameters, or of a rank's part of them
    flat_adam     flat gradient -> flat parameters
    fast_path     runs the step in fairseq's training loop; decides when fairseq's own step runs
    trainer       fairseq's Trainer with that step, and its checkpoints
    host_copies   copies a training state to host memory
    background    writes checkpoints from that copy while training continues
    stopping      signals that end training with a checkpoint
    process       wraps fairseq's training in each process
    progress      writes the line of a log interval when its results have arrived
    resuming      the state of schedules and of --patience in checkpoints
    report        log lines about a run: model, data, step; speed, memory and checkpoints
    ranks         reports ranks that no longer respond

At import, batch, objectives, step, exchange, adam_state, flat_adam and ranks need torch but not
fairseq.
"""
