"""Reads the options of `ronde run`: from the command line, `PET_*` variables and a configuration file.

The command line overrides the variables, and both override the file. Of two options that exclude each other, too, the
one from the earlier source counts; they contradict each other only within one source. As in torchrun, the variable of
an option is `PET_` and its name in capitals (`PET_RDZV_ENDPOINT`); an empty one counts as not set. Workers read the
variables of settings (`RONDE_*`, `HOROVOD_*`), which all three sources override, as in horovodrun.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ronde.cli.engine_options import ENGINE_OPTIONS
from ronde.cli.options import Given, read_options, read_value
from ronde.cli.run_options import INFORMATION, LAUNCH_OPTIONS
from ronde.errors import UsageError
from ronde.values import FLAG

__all__ = ["OPTIONS", "RunArguments", "parse_arguments"]

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
    from ronde.cli.config_file import read_config_file  # needs PyYAML

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
