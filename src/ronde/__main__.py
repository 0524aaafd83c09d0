"""`python -m ronde` is the command `ronde`."""

from __future__ import annotations

from ronde.cli import command

if __name__ == "__main__":
    command()
