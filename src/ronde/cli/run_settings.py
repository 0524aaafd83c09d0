"""Converts options of `ronde run` to variables of the workers' environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ronde.cli.engine_options import ENGINE_OPTIONS
from ronde.cli.run_arguments import RunArguments
from ronde.values import ValueKind, seconds_text

__all__ = ["idle_options", "idle_variables", "worker_settings"]

# Of torchrun's agent, with what they switch on there.
_TORCHRUNS_VARIABLES = {
    "TORCHELASTIC_ENABLE_FILE_TIMER": (
        "there is no watchdog for torch's file timer; RONDE_STALL_SHUTDOWN ends jobs that hang"
    ),
    "TORCHELASTIC_HEALTH_CHECK_PORT": "there is no health check server",
}
NEVER = str(2**31)  # no tensor is so large: the most that the setting takes


def worker_settings(asked: RunArguments, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables; `environment` is that of this process, to which some of them add."""
    settings = {}
    for option in ENGINE_OPTIONS:
        if option.variable and option.metavar and option.name in asked.given:
            settings[option.variable] = _variable_text(option.kind, asked.value(option.name))
    settings |= _flags(asked)
    if asked.has("--autotune-log"):
        settings.setdefault("RONDE_AUTOTUNE", "1")
    if asked.has("--start-timeout"):
        settings["RONDE_START_TIMEOUT"] = seconds_text(asked.value("--start-timeout"))
    if asked.has("--network-interfaces"):
        settings["RONDE_INTERFACE"] = asked.value("--network-interfaces")
        if not environment.get("NCCL_SOCKET_IFNAME"):
            settings["NCCL_SOCKET_IFNAME"] = settings["RONDE_INTERFACE"]  # it makes connections of its own
    if asked.has("--horovod"):
        from ronde.compat import PACKAGES

        settings["PYTHONPATH"] = os.pathsep.join(filter(None, [PACKAGES, environment.get("PYTHONPATH")]))
    return settings


def _variable_text(kind: ValueKind, value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return seconds_text(value) if kind.unit == "s" else str(value)


def _flags(asked: RunArguments) -> dict[str, str]:
    """Return what the options say that are yes or no, and that do not simply become 1 or 0."""
    found = {}
    for option in ENGINE_OPTIONS:
        if option.variable and not option.metavar and option.name in asked.given:
            yes = asked.value(option.name)
            match option.name:
                case "--hierarchical-allreduce" if yes:
                    found[option.variable] = "hierarchical"
                case "--hierarchical-allreduce":
                    found["RONDE_HIERARCHICAL_BYTES"] = NEVER
                case "--stall-check" if yes:
                    found["HOROVOD_STALL_CHECK_DISABLE"] = "0"  # the environment may say otherwise
                case "--stall-check":
                    found[option.variable] = "0"
                case "--no-log-hide-timestamp":
                    found[option.variable] = "0" if yes else "1"
                case _:
                    found[option.variable] = "1" if yes else "0"
    return found


def idle_options(asked: RunArguments) -> list[str]:
    """Return a sentence for each option that was given, not only by the environment, and means nothing here."""
    why = {option.name: option.idle for option in ENGINE_OPTIONS if option.idle}
    if asked.has("--standalone"):
        why["--rdzv-endpoint"] = "with --standalone one machine runs without a rendezvous"
    return [
        f"{asked.origin(name)} has no effect: {reason}"
        for name, reason in why.items()
        if name in asked.given and not asked.origin(name).startswith("PET_")
    ]


def idle_variables(environment: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable that switches something on in torchrun's agent, and nothing here."""
    return [
        f"{name} has no effect: {reason}"
        for name, reason in _TORCHRUNS_VARIABLES.items()
        if environment.get(name, "").strip() not in ("", "0")
    ]
