"""The captured step, which knows no fairseq: a packed batch -> an updated model.

training_step  packed batch -> gradients -> update, as CUDA graphs
objectives     packed batch, model -> losses, and the sums that are logged
exchange       collectives of gradients and parameters between ranks, in pieces
adam_state     moments and step counts of flat parameters, or of a rank's part of them
flat_adam      flat gradient -> flat parameters
"""
