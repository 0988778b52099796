"""Reading and writing checkpoints. Importing this package prepares fairseq.

saving             saves a state to a file atomically
names              native fairseq names of our ls_ names, and the reverse
models             which model class fairseq builds for a checkpoint
original_lightseq  converts checkpoints of the original LightSeq to fairseq's
export             exports trained models to fairseq, CTranslate2 and safetensors
from_huggingface   converts models of transformers to checkpoints of fairseq
to_huggingface     converts trained models to folders of transformers
correspondence     what a record of counterparts says
counterparts       which model of transformers computes the same as one of fairseq's
vocabulary         the rows of a tokenizer of transformers and of a dictionary
"""

from lightseq_fairseq import fairseq_compat

fairseq_compat.prepare()
