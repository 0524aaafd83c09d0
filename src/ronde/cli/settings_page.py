"""Writes docs/settings.md: `python -m ronde.cli.settings_page > docs/settings.md`."""

from __future__ import annotations

import dataclasses
from typing import Any

from ronde.settings import Settings

__all__ = ["document"]


def document() -> str:
    """Return docs/settings.md: the table of all settings, in Markdown."""
    lines = [
        "# Settings",
        "",
        "Printed by `python -m ronde.cli.settings_page`; do not edit by hand.",
        "",
        "An argument of the call goes before the variable, the variable before the default.",
        "Sizes take suffixes (`256KiB`, `1MiB`).",
        "",
        "| setting | variable | default | right values | meaning |",
        "|---|---|---|---|---|",
    ]
    for field in dataclasses.fields(Settings):
        meta = field.metadata
        if not meta:
            continue
        lines.append(
            f"| `{field.name}` | `{meta['variable']}`{_also_text(field)} | {_default_text(field)} "
            f"| {meta['right']} | {meta['help']} |"
        )
    return "\n".join(lines) + "\n"


def _also_text(field: dataclasses.Field[Any]) -> str:
    others = [field.metadata[each] for each in ("also", "off")]
    return "".join(f", `{other}`" for other in others if other)


def _default_text(field: dataclasses.Field[Any]) -> str:
    default: Any = field.default
    if default is None or default == "":
        return "none"
    if isinstance(default, bool):
        return "on" if default else "off"
    if field.name.endswith("_ns"):
        return f"{default / 1e9:g} s"
    return f"{default} {field.metadata['unit']}".strip()


if __name__ == "__main__":
    print(document(), end="")
