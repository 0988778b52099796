"""Dropout sites: each place with dropout has a number, so no two in a pass draw the same mask."""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

SITES_PER_LAYER = 8  # sites reserved for each layer; decoder layers use six
_FIRST = 1 << 20  # first site assigned here; sites that users choose are smaller


class _Pass:
    """The modules that have drawn from one rng, and their sites."""

    def __init__(self) -> None:
        self.sites: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        self.taken: set[int] = set()  # includes sites of modules that no longer exist

    def site_of(self, module: nn.Module) -> int:
        own: int | None = self.sites.get(module)
        if own is None:
            own = getattr(module, "_own_site", None)  # the site in an earlier pass
            if own is None or own in self.taken:
                own = next(n for n in count(_FIRST, SITES_PER_LAYER) if n not in self.taken)
            self.taken.add(own)
            self.sites[module] = own
            module._own_site = own  # type: ignore[assignment]
        return own


# Keyed by the rng, not stored as its attribute: an rng may be saved or copied.
_passes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def first_site(module: Any, site: int | None, rng: Tensor) -> int:
    """The first dropout site of ``module``: ``site``, or one that no other module has with ``rng``.

    Modules without a ``site`` are numbered in the order in which they first see an rng. They keep
    their number if possible, so models that are built and used in the same way draw the same masks.
    If two modules with the same number (a layer and its copy, for example) use one rng, the later
    one gets a new number.

    A module that is called twice with one rng draws the same masks twice; this is needed for
    recomputation (activation checkpointing). For different masks, pass a separate rng to the second
    call. A copy of an rng counts as another pass with the same random numbers. So for layers on
    several devices, draw an rng for each device instead of copying one.

    Raises:
        ValueError: ``rng`` is None.
    """
    if rng is None:
        raise ValueError("layers need an rng, int64 [2]: rng = lightseq_fairseq.layers.draw_rng()")
    if site is not None:
        return site
    if not module.training:
        return 0
    if rng not in _passes:
        _passes[rng] = _Pass()
    own: int = _passes[rng].site_of(module)
    return own
