"""What all other folders use.

errors           errors that the user can correct, each in one sentence
files            atomic writes of files and folders, and a lock for a run's folder
dictionaries     which dictionaries a model was trained with
optimizer_order  Adam's state for a model whose parameters have another order than the file's
library          loads the CUDA kernels of the ops
import_hook      prepares fairseq when it is first imported
families         a record of each family of models
result_rows      rows of measurements, and tables of them
"""
