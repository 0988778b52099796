"""Places that drop: each has a number, so that no two of a pass draw the same masks."""

from __future__ import annotations

from weakref import WeakValueDictionary

from torch import Tensor, nn

SITES_PER_LAYER = 8  # reserved for each layer: decoder layers use six
_OWNERS = "_lightseq_owners"  # attribute of an rng: first site -> the module that draws there


def first_site(module: nn.Module, site: int | None, rng: Tensor) -> int:
    """The first dropout site of ``module``: ``site``, or one that no other module has on ``rng``.

    Modules without a ``site`` are numbered in the order in which they first see an rng, and keep
    their number: models that are built and used alike draw alike.

    Raises:
        ValueError: two modules that were numbered in different passes have the same one.
    """
    if site is not None:
        return site
    if not module.training:
        return 0
    owners = getattr(rng, _OWNERS, None)
    if owners is None:
        owners = WeakValueDictionary()
        setattr(rng, _OWNERS, owners)
    own: int | None = getattr(module, "_own_site", None)
    if own is None:
        own = SITES_PER_LAYER * (1 + len(owners))
        while own in owners:
            own += SITES_PER_LAYER
        module._own_site = own  # type: ignore[assignment]
    if owners.setdefault(own, module) is not module:
        raise ValueError(
            f"two modules would draw the same dropout masks, at site {own}: give each of them a "
            f"site of its own, as in EncoderLayer(..., site={SITES_PER_LAYER}), the next one "
            f"site={2 * SITES_PER_LAYER}"
        )
    return own
