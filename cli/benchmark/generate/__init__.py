"""``lightseq-bench generate``: translates test sets, continues prompts by language models, and
computes features by RoBERTa, with this package and alternative systems.

test_set     sentences with newstest-like lengths, and a model that never chooses ``</s>``
cases        cases, systems, and the commands that run them
stopwatch    timed passes over the test set
decode       runs fairseq-generate's code with our model and search, or with fairseq's own
encode       computes features by fairseq's interface of RoBERTa, with our model or fairseq's own
ctranslate   runs CTranslate2 on the same sentences
hugging_face runs GPT-2 and RoBERTa of Hugging Face transformers on the same prompts and sentences
rows         reports -> result rows -> the printed table
"""
