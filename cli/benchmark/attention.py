"""sdpa attention without masks that nobody needs, for models of Hugging Face under torch.compile.

transformers makes masks only for its own names of attention functions. Under "sdpa", a compiled
model makes one even if there are no pads, and then FlashAttention and cuDNN refuse.
"""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

# For batches without pads.
WITHOUT_MASK = "sdpa_without_mask"
transformers.AttentionInterface.register(WITHOUT_MASK, sdpa_attention_forward)


def _without_causal_mask(module: nn.Module, *inputs: Any, **options: Any) -> Any:
    """sdpa's attention; a causal layer gets no mask, because pads come after all other tokens."""
    if module.is_causal:
        options["attention_mask"], inputs = None, inputs[:3]
    return sdpa_attention_forward(module, *inputs, **options)


# For pairs: their decoder gets no mask.
WITHOUT_CAUSAL_MASK = "sdpa_without_causal_mask"
transformers.AttentionInterface.register(WITHOUT_CAUSAL_MASK, _without_causal_mask)
transformers.AttentionMaskInterface.register(WITHOUT_CAUSAL_MASK, sdpa_mask)
