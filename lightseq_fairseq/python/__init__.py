"""Classes for use from Python; ``lightseq_fairseq`` has them, too.

translator      translates
language_model  continues prompts
roberta         fills in masks, classifies, extracts features
pretrained      the common code of the first two
roberta_interface   the methods of a loaded RoBERTa
"""
