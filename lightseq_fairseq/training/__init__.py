"""Training in fairseq's loop.

trainer       fairseq's Trainer with the captured step, and its checkpoints
captured      runs the captured step in that loop; decides when fairseq's own step runs
batch         dataset items -> packed batches
full_batches  --pack-tokens: batches filled by real tokens, without counting pads
host_copies   copies a training state to host memory
background    writes checkpoints from that copy while training continues
stopping      signals that end training with a checkpoint
resuming      the state of schedules and of --patience in checkpoints
process       wraps fairseq's training in each process
progress      writes the line of a log interval when its results have arrived
divergence    the message of a run whose gradients are not finite
report        log lines about a run: model, data, step; speed, memory and checkpoints
ranks         reports ranks that no longer respond

Importing this package prepares fairseq, which all of its modules import.
"""

from lightseq_fairseq import fairseq_compat

fairseq_compat.prepare()
