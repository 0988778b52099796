"""Where the numbers of a model and of its batches lie.

parameters  flat parameters and flat gradients
packing     the packed tokens of a batch, in one block
filling     fills such a block
graphs      captures functions as CUDA graphs, in one memory pool
fp8         scales and 8-bit copies of weights
gradients   the flat gradient
passes      what surrounds a forward and backward pass
"""
