"""Code that several test files share; import it as helpers.<module>."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

# Packages of the root that tests import, such as scripts for `python -m scripts.tables`. The root
# is not on the path, because there its cli would come before the tested package.
for _name in ("scripts", "examples"):
    _file = Path(__file__).resolve().parents[2] / _name / "__init__.py"
    _spec = importlib.util.spec_from_file_location(_name, _file)
    assert _spec is not None
    sys.modules.setdefault(_name, importlib.util.module_from_spec(_spec))
