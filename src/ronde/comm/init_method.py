"""Parses `ronde.init(init_method=...)`, with the meaning that torch.distributed gives it. Pure.

    env://                everything is in the environment, or an argument where that has no variable
    tcp://host:port       rank 0 serves a store there
    file:///path          the ranks meet in a file that all of them can open

`rank` and `world_size` are arguments, part of the URL (`tcp://host:port?rank=0&world_size=2`), or the environment's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ronde.errors import UsageError

__all__ = ["InitArguments", "interpret_init_arguments"]

FORMS = "expected env://, tcp://host:port or file:///path"


@dataclass(frozen=True)
class InitArguments:
    """The arguments of `identify` that an `init_method` stands for."""

    environ: Mapping[str, str]
    rank: int | None
    size: int | None
    store: str | None


def interpret_init_arguments(
    init_method: str | None,
    rank: int | None,
    size: int | None,
    world_size: int | None,
    store: str | None,
    environ: Mapping[str, str],
) -> InitArguments:
    """Return the arguments of `identify` for those of `ronde.init`; -1 counts as not given. Raises UsageError."""
    size = _agreed("size", size, "world_size", _unless_negative(world_size))
    if init_method is None:
        return InitArguments(environ, rank, size, store)
    if not isinstance(init_method, str):
        raise UsageError(f"init_method={init_method!r} is invalid: {FORMS}")
    if store is not None:
        raise UsageError(
            f"store={store!r} and init_method={init_method!r} contradict each other: both say where to meet"
        )
    scheme, slashes, rest = init_method.partition("://")
    place, _, query = rest.partition("?")
    if not slashes or scheme not in ("env", "tcp", "file") or (scheme == "env") == bool(place):
        raise UsageError(f"init_method={init_method!r} is invalid: {FORMS}")
    given = _query_arguments(init_method, query)
    rank = _agreed("rank", _unless_negative(rank), "rank in init_method", given.get("rank"))
    size = _agreed("world_size", size, "world_size in init_method", given.get("world_size"))
    environ = _complete_environment(environ, rank, size)
    if scheme == "tcp":
        return InitArguments(environ, rank, size, _tcp_store(init_method, place))
    if scheme == "file":
        if not place.startswith("/") or place.endswith("/"):
            raise UsageError(
                f"init_method={init_method!r} is invalid: expected file:///path, with three slashes"
            )
        return InitArguments(environ, rank, size, f"file:{place}")
    if rank is None and not environ.get("RANK") and not _has_launcher(environ):
        raise UsageError(
            f"init_method={init_method!r} takes RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from the environment, "
            "which does not have them: start the script by `ronde run`, or set them"
        )
    return InitArguments(environ, rank, size, None)


def _unless_negative(value: int | None) -> int | None:
    return None if value == -1 else value


def _agreed(name: str, value: int | None, other: str, again: int | None) -> int | None:
    if value is not None and again is not None and value != again:
        raise UsageError(f"{name}={value} and {other}={again} contradict each other: give one of them")
    return again if value is None else value


def _query_arguments(init_method: str, query: str) -> dict[str, int]:
    found = {}
    for part in filter(None, query.split("&")):
        name, _, text = part.partition("=")
        if name not in ("rank", "world_size") or not (text.isascii() and text.isdecimal() and len(text) < 10):
            raise UsageError(
                f"init_method={init_method!r} is invalid: {part!r} is neither rank=N nor world_size=N"
            )
        found[name] = int(text)
    return found


def _complete_environment(
    environ: Mapping[str, str], rank: int | None, size: int | None
) -> Mapping[str, str]:
    """Return the environment, with rank or size from the argument if it has only the other one."""
    if rank is not None and environ.get("WORLD_SIZE") and not environ.get("RANK"):
        return {**environ, "RANK": str(rank)}
    if size is not None and environ.get("RANK") and not environ.get("WORLD_SIZE"):
        return {**environ, "WORLD_SIZE": str(size)}
    return environ


def _tcp_store(init_method: str, place: str) -> str:
    host, colon, port = place.rstrip("/").rpartition(":")
    is_right = bool(colon and host) and (":" in host) == (host.startswith("[") and host.endswith("]"))
    if not is_right or "/" in host or not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise UsageError(
            f"init_method={init_method!r} is invalid: expected tcp://host:port, with a port from 1 to 65535"
        )
    return f"tcp:{host}:{port}"


def _has_launcher(environ: Mapping[str, str]) -> bool:
    """Return whether a launcher with other variables has started this process (`comm/identity`)."""
    return any(environ.get(name) for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_STEP_ID"))
