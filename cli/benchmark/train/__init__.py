"""``lightseq-bench train``: whole training runs of this package and of alternative systems.

`cases` has the systems and the commands that run them. Those without fairseq's training are
`compiled`; ``profiling.measured_trainer`` runs the others. `rows` makes result rows of their logs
and reports.
"""
