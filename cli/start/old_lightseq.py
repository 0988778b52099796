"""Detects the old ``lightseq`` distribution, which installs scripts of the same names."""

from __future__ import annotations

from importlib import metadata

OTHER = "lightseq"


def conflict() -> str | None:
    """A warning if the distribution ``lightseq`` is installed as well, else None.

    The script of the package that was installed last runs. Uninstalling either package removes the
    scripts of both.
    """
    try:
        scripts = metadata.distribution(OTHER).entry_points.select(group="console_scripts")
    except metadata.PackageNotFoundError:
        return None
    names = sorted(script.name for script in scripts if script.name.startswith("lightseq-"))
    if not names:
        return None
    return (
        f"The package {OTHER} is installed too, and has scripts of the same names "
        f"({', '.join(names)}): remove it (pip uninstall {OTHER}), then install lightseq-fairseq "
        f"again, because that removes the scripts of both."
    )
