"""`python -m ronde.compat script.py arguments` runs a script with Ronde in place of Horovod."""

from __future__ import annotations

import os
import runpy
import sys

from ronde.compat import install

HELP = """\
usage: python -m ronde.compat script.py [arguments]
       python -m ronde.compat -m module [arguments]

Runs a script as Python does, but `import horovod.torch` imports ronde.torch, even if Horovod is
installed. With several processes, and in the processes that the script itself starts:

    ronde run --horovod -n 4 script.py
"""


def main(words: list[str]) -> int:
    """Run the script or module that the words after `python -m ronde.compat` name."""
    is_module = words[:1] == ["-m"]
    if is_module:
        del words[0]
    if not words or words[0] in ("-h", "--help"):
        print(HELP, end="", file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    sys.argv = words
    if not is_module:
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
    install(force=True)
    if is_module:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
