"""Reads the options of `ronde run`: from the command line, `PET_*` variables and a configuration file.

The command line overrides the variables, and both override the file. Of two options that exclude each other, too, the
one from the earlier source counts; they contradict each other only within one source. As in torchrun, the variable of
an option is `PET_` and its name in capitals (`PET_RDZV_ENDPOINT`); an empty one counts as not set. Workers read the
variables of settings (`RONDE_*`, `HOROVOD_*`), which all three sources override, as in horovodrun.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ronde.cli.engine_options import ENGINE_OPTIONS
from ronde.cli.options import Given, Option, nearest, read_options, read_value
from ronde.cli.run_options import INFORMATION, LAUNCH_OPTIONS
from ronde.errors import UsageError
from ronde.values import FLAG

__all__ = ["OPTIONS", "RunArguments", "parse_arguments", "read_config_file"]

OPTIONS = LAUNCH_OPTIONS + ENGINE_OPTIONS
_NAMES = frozenset(option.name for option in OPTIONS)

# Options that exclude each other, and why.
_EXCLUSIVE = (
    ("--module", "--no-python", "a module can only be run by Python"),
    ("--module", "--run-path", "one is for modules, the other for files"),
    ("--hosts", "--hostfile", "both name the hosts"),
    ("--hosts", "--host-discovery-script", "both name the hosts"),
    ("--hostfile", "--host-discovery-script", "both name the hosts"),
    ("--standalone", "--rdzv-endpoint", "one machine needs no rendezvous"),
    ("--standalone", "--hosts", "a job of one machine has no other hosts"),
    ("--standalone", "--hostfile", "a job of one machine has no other hosts"),
    (
        "--standalone",
        "--host-discovery-script",
        "a job of one machine has no other hosts",
    ),
    ("--bind", "--numa-binding", "both say to which processors workers are bound"),
    ("--log-dir", "--output-filename", "both name the directory of the files"),
    ("--gloo", "--mpi", "both choose the controller"),
)


# torchrun accepts these two together and ignores the second; so does Ronde, with a message (`idle_options`).
_TOLERATED = ("--standalone", "--rdzv-endpoint")


class RunArguments(NamedTuple):
    """The program to run, its arguments, and the options by their last names."""

    name: str
    arguments: tuple[str, ...]
    given: Mapping[str, Given]

    def value(self, name: str, default: Any = None) -> Any:
        """Return the value of an option, or the default if it was not given."""
        assert name in _NAMES, name
        each = self.given.get(name)
        return default if each is None else each.value

    def origin(self, name: str) -> str:
        """Return how the user wrote the option, or its name if it was not given."""
        assert name in _NAMES, name
        each = self.given.get(name)
        return name if each is None else each.origin

    def has(self, *names: str) -> bool:
        """Return whether any of the options was given, other than as a negated flag."""
        return any(self.value(name) is not None and self.value(name) is not False for name in names)


def parse_arguments(argv: Sequence[str], environment: Mapping[str, str]) -> RunArguments:
    """Return the arguments in the words after `ronde run` and in `environment`, the whole one of this process.

    Reads the configuration file if the arguments name one. Raises UsageError for invalid values and contradictions.
    """
    words, rest = read_options(argv, OPTIONS)
    variables = _from_environment(environment)
    given = _settle_levels(words, variables, _from_file(words, variables))
    if not rest:
        wanted = "module" if "--module" in given else "script"
        raise UsageError(f"no {wanted} given: write, for example, ronde run -n 4 train.py")
    return RunArguments(rest[0], tuple(rest[1:]), given)


def _from_environment(environment: Mapping[str, str]) -> dict[str, Given]:
    if not any(name.startswith("PET_") for name in environment):  # the usual case, which is faster
        return {}
    given = {}
    for option in OPTIONS:
        variable = "PET_" + option.name.lstrip("-").upper().replace("-", "_")
        text = environment.get(variable, "").strip()
        is_question = option.group == INFORMATION and not option.metavar
        if not text or is_question or option.refused:
            continue
        given[option.name] = (
            read_value(option, variable, text, "=") if option.metavar else _flag(variable, text)
        )
    return given


def _flag(variable: str, text: str) -> Given:
    return Given(FLAG.read(text, f"{variable}={text}"), variable)


def _from_file(words: Mapping[str, Given], variables: Mapping[str, Given]) -> dict[str, Given]:
    named = words.get("--config-file") or variables.get("--config-file")
    if named is None:
        return {}
    return read_config_file(named.value, OPTIONS)


def _settle_levels(*levels: Mapping[str, Given]) -> dict[str, Given]:
    """Return the options of all levels; an earlier level overrides a later one."""
    given: dict[str, Given] = {}
    level_of: dict[str, int] = {}
    for number, level in enumerate(levels):
        for name, each in level.items():
            if name not in given:
                given[name], level_of[name] = each, number
    for one, other, why in _EXCLUSIVE:
        if not all(name in given and given[name].value is not False for name in (one, other)):
            continue
        if level_of[one] == level_of[other]:
            if (one, other) == _TOLERATED:
                continue
            both = f"{given[one].origin} and {given[other].origin}"
            raise UsageError(f"{both} contradict each other, because {why}: leave one of them out")
        del given[max(one, other, key=lambda name: level_of[name])]
    return given


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
