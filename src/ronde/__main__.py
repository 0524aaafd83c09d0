"""`python -m ronde` is the command `ronde`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, and explain an import that fails because a file in the current folder hides a module."""
    try:
        from ronde.cli import command

        command()
    except (ImportError, AttributeError) as error:
        import traceback

        from ronde.hidden_modules import describe_hiding

        text = "".join(traceback.format_exception(error))
        if hint := describe_hiding(text, next(iter(sys.path), "")):
            error.add_note(f"{hint}, or run the command `ronde` instead of `python -m ronde`")
        raise


if __name__ == "__main__":
    main()
