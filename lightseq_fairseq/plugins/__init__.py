"""The fairseq plugins. Importing this package registers them with fairseq.

    transformer  --arch ls_transformer...
    multilingual --arch ls_multilingual_transformer...
    language_model --arch ls_transformer_lm...
    roberta      --arch ls_roberta..., ls_xlm
    bart         --arch ls_bart_base, ls_bart_large, ls_mbart...
    marian       --arch ls_marian_base, ls_marian_big, ls_pegasus_large
    sizes        --arch ls_transformer_m2m_100..., ls_transformer_nllb...
    criterion    --criterion ls_label_smoothed_cross_entropy, ls_cross_entropy, ls_masked_lm,
                 ls_sentence_prediction
    optimizer    --optimizer ls_adam
    generator    our search, by task.build_generator
    raw_text     --bpe tokenizer_folder

``lightseq-train`` imports the package as ``lightseq_fairseq.plugins``, which changes only fairseq's
registries. ``fairseq-train --user-dir`` with this folder imports it as ``plugins``, possibly a
second time; then the repairs and patches of `fairseq_compat` are applied as well. The imports below
are absolute, so that a second import finds the modules loaded: fairseq refuses to register a name
twice.
"""

from lightseq_fairseq import fairseq_compat
from lightseq_fairseq.base.families import FAMILIES, named
from lightseq_fairseq.fairseq_compat import patching

# Must run before the first import of fairseq, which may fail without it.
fairseq_compat.import_only()

from fairseq.models import (  # noqa: E402
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_INV_REGISTRY,
    ARCH_MODEL_REGISTRY,
    register_model_architecture,
)

from lightseq_fairseq.plugins import criterion, optimizer, raw_text  # noqa: E402, F401
from lightseq_fairseq.plugins.flat_model import registered_name  # noqa: E402

for family in FAMILIES:
    if not family.native:
        continue  # its module registers the archs
    ours, native = (registered_name(named(place)) for place in (family.ours, family.native))
    for arch in ARCH_MODEL_INV_REGISTRY[native]:
        if f"ls_{arch}" not in ARCH_MODEL_REGISTRY:  # with a dataclass, register_model adds one
            register_model_architecture(ours, f"ls_{arch}")(ARCH_CONFIG_REGISTRY[arch])

from lightseq_fairseq.plugins import marian, sizes  # noqa: E402, F401

if __name__ != f"{patching.PACKAGE}.plugins":
    # FlatModel.build_model calls these too, but too late for --bf16 and for loading checkpoints.
    fairseq_compat.prepare()
    patching.apply("model")
