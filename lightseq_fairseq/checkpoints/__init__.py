"""Reading and writing checkpoints. Importing this package imports none of its modules.

files              atomic writes of files and folders, and a lock for a run's folder
saving             saves a state to a file atomically
names              native fairseq names of our ls_ names, and the reverse
models             which model class fairseq builds for a checkpoint
optimizer_order    Adam's state for a model whose parameters have another order than the file's
dictionaries       which dictionaries a model was trained with
original_lightseq  converts checkpoints of the original LightSeq to fairseq's
export             exports trained models to fairseq, CTranslate2 and safetensors
"""
