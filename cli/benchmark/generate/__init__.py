"""``lightseq-bench generate``: test sets translated, ours beside what else a user could set up.

test_set     sentences as long and as frequent as newstest's, and a model that never ends a sentence
cases        what is translated, by which systems, with which commands
stopwatch    the passes over the test set, timed
decode       one system of fairseq's, ours or its own, through the doors of fairseq-generate
ctranslate   the same sentences by CTranslate2
rows         reports -> result rows -> the printed table
"""
