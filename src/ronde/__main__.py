"""`python -m ronde` is the command `ronde`."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line, and explain an import that fails because a file in the current folder hides a module."""
    try:
        from ronde.cli import command

        command()
    except (ImportError, AttributeError) as error:
        import traceback

        from ronde.hidden_modules import describe_hiding

        hint = describe_hiding("".join(traceback.format_exception(error)), os.getcwd())
        if not hint:
            raise
        print(f"ronde: {hint}, or run the command `ronde` instead of `python -m ronde`", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
