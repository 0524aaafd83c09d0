"""The table of keys of --rdzv-conf, with their valid values. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ronde.cli.options import nearest
from ronde.cli.run_arguments import RunArguments
from ronde.cli.run_here import BACKENDS
from ronde.cli.run_values import count, seconds, whole
from ronde.errors import UsageError
from ronde.net.rendezvous.config import truth

__all__ = ["conf_fields"]

LEAST_NS = 10**8


class _Key(NamedTuple):
    """How a value is read, what would be right, and the field of RendezvousConfig that it sets, if any."""

    parse: Callable[[str], object]
    right: str
    field: str = ""


def _soon(text: str) -> int:
    """A time that is not so short that nothing could happen in it."""
    if seconds(text) < LEAST_NS:
        raise ValueError(text)
    return seconds(text)


def _positive(text: str) -> int:
    if seconds(text) <= 0:
        raise ValueError(text)
    return seconds(text)


_SOON = _Key(_soon, f"a number of seconds, {LEAST_NS / 1e9:g} or more")
_TIME = _Key(seconds, "a number of seconds")
_POSITIVE = _Key(_positive, "a number of seconds above 0")
_TRUTH = _Key(truth, "true or false")
_TEXT = _Key(str, "a text")

_KEYS = {
    "timeout": _SOON._replace(field="join_timeout_ns"),
    "join_timeout": _SOON._replace(field="join_timeout_ns"),
    "last_call_timeout": _TIME._replace(field="last_call_ns"),
    "keep_alive_interval": _SOON._replace(field="heartbeat_ns"),
    "exit_barrier_timeout": _TIME._replace(field="exit_barrier_ns"),
    "keep_alive_max_attempt": _Key(count, "a whole number from 1", "missing_heartbeats"),
    # Of our own backends; what a store_type or protocol is, they say themselves.
    "is_host": _TRUTH,
    "rehost": _TRUTH,
    **dict.fromkeys(
        ("store_type", "protocol", "ca_cert", "ssl_cert", "ssl_cert_key", "cacert", "cert", "key"), _TEXT
    ),
    # What torchrun's backends take, and ours have no need for.
    **dict.fromkeys(("close_timeout", "heartbeat_timeout", "read_timeout"), _POSITIVE),
    "rank": _Key(whole, "a whole number from 0"),
    "use_libuv": _TRUTH,
    "etcd_prefix": _TEXT,
}


def conf_fields(asked: RunArguments, backend: str, conf: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of the configuration that --rdzv-conf sets. What others' backends take is their business."""
    found: dict[str, Any] = {}
    for name, text in conf.items():
        said, key = f"{asked.origin('--rdzv-conf')} {name}={text}", _KEYS.get(name)
        if key is None:
            if backend in BACKENDS:
                raise UsageError(f"{said}: {name} is not known{nearest(name, [*_KEYS])}")
            continue
        if not key.field and backend not in BACKENDS:
            continue
        try:
            value = key.parse(text)
        except ValueError:
            raise UsageError(f"{said} is invalid: expected {key.right}") from None
        if key.field:
            found[key.field] = value
    return found
