"""The configuration file of `ronde run`: YAML as horovodrun reads it.

    params:
      fusion_threshold_mb: 32
    timeline:
      filename: traces/
    nnodes: 2                # any other option by its name

Sections are horovodrun's; every other key of the file is the name of an option, with dashes or underscores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ronde.cli.options import Given, Option, nearest, read_value
from ronde.errors import UsageError

__all__ = ["read_config_file"]

SECTIONS = ("params", "autotune", "timeline", "stall_check", "library_options", "logging")
CONTROLLERS = ("gloo", "mpi")
NOT_IN_FILES = ("config_file", "help", "h", "version", "check_build")
# Former names of some entries of horovodrun, one of which had the opposite meaning.
FORMER = {
    "library_options.ccl_bgt_affinity": "library_options.thread_affinity",
    "logging.hide_timestamp": "logging.with_timestamp",
}
OPPOSITE = "logging.hide_timestamp"


def read_config_file(path: str, table: Sequence[Option]) -> dict[str, Given]:
    """Return the options that the file sets, by their last names. Raises UsageError that names the place in it."""
    places = {option.place: option for option in table if option.place}
    names = {option.name.lstrip("-").replace("-", "_"): option for option in table}
    for elsewhere in NOT_IN_FILES:
        names.pop(elsewhere, None)
    given = {}
    for place, value in _entries(_load(path), path):
        origin = f"{place} in {path}"
        key = place.replace("-", "_")
        if key == "controller":
            if str(value).lower() not in CONTROLLERS:
                raise UsageError(f"{origin}: {value} is invalid: expected gloo or mpi")
            continue
        option = places.get(FORMER.get(key, key)) or names.get(key)
        if option is None:
            known = [*places, *names, "controller"]
            raise UsageError(f"{origin} is not known{nearest(key, known)}")
        if value is not None:
            each = _value(option, origin, value)
            given[option.name] = Given(not each.value, origin) if key == OPPOSITE else each
    return given


def _value(option: Option, origin: str, value: Any) -> Given:
    if option.metavar:
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        return read_value(option, origin, text, ": ")
    if not isinstance(value, bool):
        raise UsageError(f"{origin}: {value} is invalid: expected true or false")
    return Given(value, origin)


def _entries(content: Mapping[Any, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if key not in SECTIONS:
            yield str(key), value
        elif isinstance(value, dict):
            for name, inner in value.items():
                yield f"{key}.{name}", inner
        elif value is not None:
            raise UsageError(f"{key} in {path}: {value} is invalid: expected names and values, indented")


def _load(path: str) -> Mapping[Any, Any]:
    try:
        import yaml
    except ImportError:
        raise UsageError(
            f"reading {path} needs PyYAML, which is not installed: pip install 'ronde[yaml]'"
        ) from None
    try:
        with open(path, encoding="utf-8-sig") as file:
            content = yaml.safe_load(file)
    except OSError as error:
        raise UsageError(f"cannot read the configuration file {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(
            f"{path} should hold names and values, like `nnodes: 2`, not a {type(content).__name__}"
        )
    return content
