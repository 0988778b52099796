"""Importing this prepares fairseq, for modules whose next imports are fairseq's."""

from lightseq_fairseq import fairseq_compat

fairseq_compat.prepare()
