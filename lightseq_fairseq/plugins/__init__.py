"""Everything that fairseq gets to know of this package: importing it registers the plugins.

    transformer  --arch ls_transformer...
    multilingual --arch ls_multilingual_transformer...
    language_model --arch ls_transformer_lm...
    criterion    --criterion ls_label_smoothed_cross_entropy, ls_cross_entropy
    optimizer    --optimizer ls_adam
    generator    what task.build_generator gives for our model

``lightseq-train`` imports it as ``lightseq_fairseq.plugins``, which changes nothing in fairseq but
its registries. ``fairseq-train --user-dir`` with this folder imports it, maybe once more, as
``plugins``: a command asks for our parts, and gets the repairs and hooks with them. The imports
below are absolute so that a second one finds the modules loaded: registering a name twice is an
error.
"""

from lightseq_fairseq import fairseq_compat
from lightseq_fairseq.fairseq_compat import patching

# Before the first import of fairseq, which need not succeed without it.
fairseq_compat.import_only()

from lightseq_fairseq.plugins import transformer  # noqa: E402, F401, I001
from lightseq_fairseq.plugins import language_model, multilingual  # noqa: E402, F401
from lightseq_fairseq.plugins import criterion, optimizer  # noqa: E402, F401

if __name__ != f"{patching.PACKAGE}.plugins":
    # A model that is built asks for them too, which is late for --bf16 and for loading checkpoints.
    fairseq_compat.prepare()
    patching.apply("model")
