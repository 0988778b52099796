"""``lightseq-bench generate``: translates test sets, and continues prompts by language models, with
this package and alternative systems.

test_set     sentences with newstest-like lengths, and a model that never chooses ``</s>``
cases        cases, systems, and the commands that run them
stopwatch    timed passes over the test set
decode       runs fairseq-generate's code with our model and search, or with fairseq's own
ctranslate   runs CTranslate2 on the same sentences
hugging_face runs GPT-2 of Hugging Face transformers on the same prompts
rows         reports -> result rows -> the printed table
"""
