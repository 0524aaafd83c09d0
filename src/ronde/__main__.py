"""`python -m ronde` is the command `ronde`."""

from __future__ import annotations

import sys

from ronde.cli import main

if __name__ == "__main__":
    sys.exit(main())
