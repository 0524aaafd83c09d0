"""The template that this process keeps for its next job, whose workers then need no imports.

There is one at most. A template ends with the thread that made it, so only the main thread calls this.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ronde.launch.templates.template import Template

__all__ = ["close_kept_template", "keep_template", "take_template"]

_kept: list[Template] = []


def keep_template(template: Template) -> None:
    """Keep a template without workers for `take_template`, instead of the one that was kept before."""
    close_kept_template()
    _kept.append(template)


def take_template(
    argv: Sequence[str], environment: Mapping[str, str], modules: Sequence[str] | None
) -> Template | None:
    """Return the kept template, which the caller then owns; None if there is none that can fork such workers.

    `modules`: what they import. A template that cannot is closed.
    """
    if _kept and _kept[0].can_serve(argv, environment, modules):
        return _kept.pop()
    close_kept_template()
    return None


def close_kept_template() -> None:
    """End the kept template, if there is one."""
    while _kept:
        _kept.pop().close()


def _forget_in_child() -> None:
    while _kept:
        _kept.pop().leave_to_parent()


os.register_at_fork(after_in_child=_forget_in_child)
