"""Importing this module calls ``prepare()``. Import it before fairseq's modules."""

from lightseq_fairseq import fairseq_compat

fairseq_compat.prepare()
