"""Reading and writing checkpoints. Importing this package prepares fairseq.

saving             saves a state to a file atomically
names              native fairseq names of our ls_ names, and the reverse
models             which model class fairseq builds for a checkpoint
original_lightseq  converts checkpoints of the original LightSeq to fairseq's
export             exports trained models to fairseq, CTranslate2 and safetensors
"""

from lightseq_fairseq import fairseq_compat

fairseq_compat.prepare()
