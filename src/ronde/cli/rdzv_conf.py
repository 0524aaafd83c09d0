"""The table of keys of --rdzv-conf, with their valid values. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ronde.cli.options import nearest
from ronde.cli.run_arguments import RunArguments
from ronde.cli.run_here import BACKENDS
from ronde.errors import UsageError
from ronde.values import FLAG, SECONDS, TEXT, count_from, seconds_from

__all__ = ["conf_fields"]

_SOON = seconds_from("a number of seconds, 0.1 or more", 10**8)  # less is too short for anything to happen
_POSITIVE = seconds_from("a number of seconds above 0", 1)

# How a value is read, and the field of RendezvousConfig that it sets, if any.
_KEYS = {
    "timeout": (_SOON, "join_timeout_ns"),
    "join_timeout": (_SOON, "join_timeout_ns"),
    "last_call_timeout": (SECONDS, "last_call_ns"),
    "keep_alive_interval": (_SOON, "heartbeat_ns"),
    "exit_barrier_timeout": (SECONDS, "exit_barrier_ns"),
    "keep_alive_max_attempt": (count_from(1), "missing_heartbeats"),
    # Of Ronde's own backends, which check store_type and protocol themselves.
    **dict.fromkeys(("is_host", "rehost"), (FLAG, "")),
    **dict.fromkeys(
        ("store_type", "protocol", "ca_cert", "ssl_cert", "ssl_cert_key", "cacert", "cert", "key"), (TEXT, "")
    ),
    # Of torchrun's backends; Ronde's do not need them.
    **dict.fromkeys(("close_timeout", "heartbeat_timeout", "read_timeout"), (_POSITIVE, "")),
    "rank": (count_from(0), ""),
    "use_libuv": (FLAG, ""),
    "etcd_prefix": (TEXT, ""),
}


def conf_fields(asked: RunArguments, backend: str, conf: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of the configuration that --rdzv-conf sets. What others' backends take is their business."""
    found: dict[str, Any] = {}
    for name, text in conf.items():
        shown, (kind, field) = f"{asked.origin('--rdzv-conf')} {name}={text}", _KEYS.get(name, (None, ""))
        if kind is None:
            if backend in BACKENDS:
                raise UsageError(f"{shown}: {name} is not known{nearest(name, [*_KEYS])}")
            continue
        if not field and backend not in BACKENDS:
            continue
        value = kind.read(text, shown)
        if field:
            found[field] = value
    return found
