"""Profiles of a training's steps, for ``lightseq-profile`` and ``lightseq-bench``.

`measured_trainer` runs lightseq-train and measures it, `timeline` reads its trace, `work` counts
what its ops must do, `rates` measures what the machine can do; `report` and `picture` compare them.
"""
