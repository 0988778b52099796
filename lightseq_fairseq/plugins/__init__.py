"""Everything that fairseq gets to know of this package: importing it registers the plugins.

    transformer  --arch ls_transformer...
    multilingual --arch ls_multilingual_transformer...
    criterion    --criterion ls_label_smoothed_cross_entropy
    optimizer    --optimizer ls_adam
    generator    what task.build_generator gives for our model

``lightseq-train`` imports it as ``lightseq_fairseq.plugins``; ``fairseq-train --user-dir`` with
this folder imports it once more as ``plugins``. The imports below are absolute so that the second
one finds the modules loaded: registering a name twice is an error.
"""

from lightseq_fairseq import fairseq_compat

# Before the first import of fairseq, which need not succeed without it.
fairseq_compat.prepare()

from lightseq_fairseq.plugins import transformer  # noqa: E402, F401, I001
from lightseq_fairseq.plugins import multilingual  # noqa: E402, F401
from lightseq_fairseq.plugins import criterion, generator, optimizer  # noqa: E402, F401
