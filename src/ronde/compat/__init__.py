"""Makes `import horovod.torch as hvd` import `ronde.torch`, so that scripts for Horovod run unchanged.

There are three ways: `ronde run --horovod -n 4 script.py`; under other launchers `python -m ronde.compat script.py`; or
`import ronde.compat` before the first import of Horovod.

The folder `packages` contains a package named horovod, whose modules export the names of `ronde.torch`. `install` adds
this folder to Python's search path: at the end, so that an installed Horovod precedes it, or with force at the front.
"""

from __future__ import annotations

import logging
import os
import sys
from importlib.machinery import PathFinder

from ronde.errors import UsageError

__all__ = ["PACKAGES", "install"]

PACKAGES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "packages")

_log = logging.getLogger(__name__)


def install(force: bool = False) -> bool:
    """Make `import horovod` import Ronde's package of that name; return whether it does.

    Args:
        force: Precede an installed Horovod, too (default: an installed Horovod is imported as before).

    Raises:
        UsageError: `force` is true, but Horovod has been imported already.
    """
    loaded: str | None = getattr(sys.modules.get("horovod"), "__file__", None)
    if loaded is not None:
        is_ours = loaded.startswith(PACKAGES + os.sep)
        if force and not is_ours:
            raise UsageError(
                f"Horovod has been imported already, from {loaded}: install ronde.compat before that"
            )
        return is_ours
    others = [folder for folder in sys.path if folder != PACKAGES]
    found = PathFinder.find_spec("horovod", others)
    # A plain folder of that name, which has no origin, does not count as an installed Horovod.
    if found is not None and found.origin is not None and not force:
        _log.info("Horovod is installed in %s, so Ronde does not replace it", found.origin)
        return False
    sys.path[:] = [PACKAGES, *others] if force else [*others, PACKAGES]
    return True


install()
