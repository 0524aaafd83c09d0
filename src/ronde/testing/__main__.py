"""One rank of `ronde.testing.ranks`, which makes this command line: `-m ronde.testing CONNECTION STACKS PARENT`."""

from __future__ import annotations

import sys

from ronde.testing.worker import main

main(*map(int, sys.argv[1:]))
