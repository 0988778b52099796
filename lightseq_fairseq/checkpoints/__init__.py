"""What is left on disk, and who can read it. Importing this package loads none of it.

files              files and folders that are whole or not there, and a folder for one run alone
saving             a state into such a file
names              what fairseq calls what we call ls_..., and the other way round
models             which model fairseq builds for a checkpoint
optimizer_order    Adam's state in a file whose parameters are others than the model's
dictionaries       which dictionaries a model was trained with
original_lightseq  checkpoints of the original LightSeq as fairseq's
export             trained models for fairseq, CTranslate2 and safetensors
"""
