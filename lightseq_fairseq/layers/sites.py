"""Places that drop: each has a number, so that no two of a pass draw the same masks."""

from __future__ import annotations

from itertools import count
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

SITES_PER_LAYER = 8  # reserved for each layer: decoder layers use six
_FIRST = 1 << 20  # of the sites that are given here; those that users choose lie below


class _Pass:
    """The modules that have drawn from one rng."""

    def __init__(self) -> None:
        self.sites: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        self.taken: set[int] = set()  # also by modules that are no more

    def site_of(self, module: nn.Module) -> int:
        own: int | None = self.sites.get(module)
        if own is None:
            own = getattr(module, "_own_site", None)  # of another pass
            if own is None or own in self.taken:
                own = next(n for n in count(_FIRST, SITES_PER_LAYER) if n not in self.taken)
            self.taken.add(own)
            self.sites[module] = own
            module._own_site = own  # type: ignore[assignment]
        return own


# Beside the rngs and not on them: an rng may be saved and copied.
_passes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def first_site(module: nn.Module, site: int | None, rng: Tensor) -> int:
    """The first dropout site of ``module``: ``site``, or one that no other module has on ``rng``.

    Modules without a ``site`` are numbered in the order in which they first see an rng, and keep
    their number where they can: models that are built and used alike draw alike. Where two modules
    with one number meet, a layer and its copy say, the later one gets another.

    A module that is called twice with one rng draws the same masks twice, as a pass that is
    recomputed has to. For other masks, give the second call an rng of its own. A copy of an rng
    counts as another pass with the same numbers: layers on several devices take one drawn for each
    device, not copies of one.

    Raises:
        ValueError: there is no rng, which training needs.
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
