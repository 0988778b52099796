"""What the failures of fairseq and torch mean that a user can correct, by what they are about.

known       a failure that is recognised by its message alone
cause       the original exception, below fairseq's wrapper or in another process's traceback
data, checkpoints, settings, machine
            the rules; `cli.checks.messages.explain` applies them in this order
"""
