"""All settings of the engine: arguments of the call override `RONDE_*` variables, which override defaults.

The dataclass `Settings` is the only table: names, variables, units, defaults and help. `cli/pages` generates
docs/settings.md from it.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ronde.environment import environment, set_defaults
from ronde.errors import UsageError
from ronde.job_key import KEY_BYTES, JobKey
from ronde.values import (
    CORES,
    FILE,
    FLAG,
    LIST_OF_BACKENDS,
    LOG_LEVEL,
    OFF_OR_ALWAYS,
    POSITIVE_SECONDS,
    PROTECTION,
    ValueKind,
    between,
    bytes_up_to,
    count_from,
    horovods_log_level,
    is_text,
    milliseconds,
    one_of,
    seconds_from,
    seconds_or,
    seconds_text,
    size,
    whole,
)

__all__ = [
    "JobKey",
    "Settings",
    "assignment",
    "environment",
    "ignored_horovod_variables",
    "resolve",
    "set_defaults",
]

PREFIX = "RONDE_"
_log = logging.getLogger(__name__)


def _setting(
    variable: str,
    default: object,
    help: str,
    kind: ValueKind,
    *,
    secret: bool = False,
    also: str = "",
    kind_also: ValueKind | None = None,
    off: str = "",
) -> Any:
    metadata = {
        "variable": variable,
        "also": also,  # Horovod's variable of the same meaning; Ronde's overrides it
        "kind_also": kind_also or kind,
        "off": off,  # Horovod's variable that makes it 0 if it is 1
        "help": help,
        "kind": kind,
        "secret": secret,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    """The immutable value of every setting, made by `resolve`."""

    store: str | None = _setting(
        "RONDE_STORE",
        None,
        "Address of the store in which the ranks meet. The launcher serves it.",
        ValueKind(
            "an address like unix:@name, unix:/path or tcp:host:port",
            check=lambda value: is_text(value) and value.startswith(("unix:", "tcp:")),
        ),
    )
    job_key: JobKey | None = _setting(  # noqa: RUF009 (the default is None)
        "RONDE_JOB_KEY",
        None,
        "The job key, a secret. Both ends of each connection prove that they know it.",
        ValueKind(
            f"{2 * KEY_BYTES} hexadecimal digits", JobKey.from_hex, lambda value: isinstance(value, JobKey)
        ),
        secret=True,
    )
    job_key_fd: int | None = _setting(
        "RONDE_JOB_KEY_FD",
        None,
        "Instead of `job_key`: an inherited descriptor of a memory file with it, which `init` reads and closes.",
        ValueKind("the number of a file descriptor", whole, between(0)),
    )
    job_key_file: str = _setting(
        "RONDE_JOB_KEY_FILE",
        "",
        "Instead of `job_key`: a file with it that only you can read (else `~/.config/ronde/job.key`, made once).",
        FILE,
    )
    insecure_job_key: bool = _setting(
        "RONDE_INSECURE_JOB_KEY",
        False,
        "Without a key, use the job's name as the key: a stranger who guesses it can join and run programs.",
        FLAG,
    )
    transport: str = _setting(
        "RONDE_TRANSPORT",
        "auto",
        "`auto`: shared memory within a host, TCP between hosts; `tcp`: TCP only, each rank counts as a host.",
        one_of("auto", "tcp"),
    )
    protection: str = _setting(
        "RONDE_PROTECTION",
        "messages",
        "Protection between hosts. `messages`: authenticate everything except tensors; `payload`: authenticate "
        "tensors, too; `secret`: also encrypt everything (docs/security.md).",
        PROTECTION,
    )
    tcp_streams: int = _setting(
        "RONDE_TCP_STREAMS",
        2,
        "Number of data connections to each rank on another host. Payload is striped over them.",
        count_from(1, 64),
    )
    interface: str | None = _setting(
        "RONDE_INTERFACE",
        None,
        "Network interface of data connections, by name or address (else the one that reaches the store).",
        ValueKind("the name of a network interface or a numeric address", check=is_text),
        also="HOROVOD_GLOO_IFACE",
    )
    host_id: str = _setting(
        "RONDE_HOST_ID",
        "",
        "Name of the host: ranks with different values count as ranks of different hosts.",
        ValueKind(
            "a text of at most 256 characters",
            check=lambda value: isinstance(value, str) and len(value) <= 256,
        ),
    )
    allreduce_algorithm: str = _setting(
        "RONDE_ALLREDUCE_ALGORITHM",
        "auto",
        "Algorithm of all-reduce. `auto` chooses by size and topology.",
        one_of("auto", "direct", "ring", "doubling", "hierarchical"),
    )
    hierarchical_allgather: bool = _setting(
        "RONDE_HIERARCHICAL_ALLGATHER",
        True,
        "All-gather sends each block to a host once, if all hosts have the same number of ranks.",
        FLAG,
        also="HOROVOD_HIERARCHICAL_ALLGATHER",
    )
    adasum_hierarchical: bool = _setting(
        "RONDE_ADASUM_HIERARCHICAL",
        False,
        "Adasum combines the averages of the hosts, instead of the arrays of all ranks.",
        FLAG,
    )
    start_timeout_ns: int = _setting(
        "RONDE_START_TIMEOUT",
        300 * 10**9,
        "How long `init` waits until all ranks have joined.",
        POSITIVE_SECONDS,
        also="HOROVOD_START_TIMEOUT",
    )
    timeout_ns: int = _setting(
        "RONDE_TIMEOUT",
        0,
        "How long a collective waits for other ranks before it raises `TimeoutError`; 0: no limit.",
        seconds_or("no limit"),
    )
    peer_timeout_ns: int = _setting(
        "RONDE_PEER_TIMEOUT",
        8 * 10**9,
        "How long a host may be unreachable before its ranks count as lost.",
        seconds_from("a number of seconds from 1 to 86400", 10**9, 86400 * 10**9),
    )
    spin_us: int = _setting(
        "RONDE_SPIN",
        -1,
        "How long a waiting rank spins before it sleeps; -1: chosen by the number of ranks and cores.",
        ValueKind(
            "a whole number of microseconds from 0 to 1000000, or -1 for automatic",
            whole,
            between(-1, 10**6),
            "us",
        ),
    )
    staging_bytes: int = _setting(
        "RONDE_STAGING_BYTES",
        256 * 1024,
        "Size of the chunks, per rank, in which arrays in private memory pass through shared memory.",
        ValueKind(
            "a multiple of 4 KiB from 4KiB to 1GiB, such as 262144 or 256KiB",
            size,
            lambda value: between(4096, 2**30)(value) and value % 4096 == 0,
            "bytes",
        ),
    )
    cache_capacity: int = _setting(
        "RONDE_CACHE_CAPACITY",
        16384,
        "Number of named tensors that the engine remembers, so that they need no new negotiation; 0: none.",
        count_from(0, 2**20),
        also="HOROVOD_CACHE_CAPACITY",
    )
    fusion_bytes: int = _setting(
        "RONDE_FUSION_BYTES",
        32 * 2**20,
        "The engine reduces small tensors together, up to this size; 0 disables fusion.",
        bytes_up_to("2GiB"),
        also="HOROVOD_FUSION_THRESHOLD",
    )
    tree_arity: int = _setting(
        "RONDE_TREE_ARITY",
        8,
        "Number of hosts that report to the same host when the engine's ranks negotiate.",
        count_from(1, 2**20),
    )
    linger_ns: int = _setting(
        "RONDE_LINGER",
        5_000_000,
        "How long the engine may wait for more small tensors to fuse, while no thread waits for one; 0: never.",
        seconds_from("a number of seconds from 0 to 1", 0, 10**9),
        also="HOROVOD_CYCLE_TIME",
        kind_also=ValueKind(
            "a number of milliseconds, 0 or more", lambda text: min(milliseconds(text), 10**9)
        ),
    )
    batch_bytes: int | None = _setting(
        "RONDE_BATCH_BYTES",
        None,
        "The engine runs this many bytes once they are ready, before `linger_ns` is over. None: 1 MiB.",
        bytes_up_to("2GiB"),
    )
    largest_fused_bytes: int | None = _setting(
        "RONDE_LARGEST_FUSED_BYTES",
        None,
        "Largest tensor that is fused with others. None: 64 KiB on one host, no limit between hosts.",
        bytes_up_to("2GiB"),
    )
    hierarchical_bytes: int | None = _setting(
        "RONDE_HIERARCHICAL_BYTES",
        None,
        "Smallest all-reduce that `auto` does by `hierarchical` where hosts have several ranks. None: 0 bytes.",
        bytes_up_to("2GiB"),
        also="HOROVOD_HIERARCHICAL_ALLREDUCE",
        kind_also=OFF_OR_ALWAYS,
    )
    doubling_bytes: int | None = _setting(
        "RONDE_DOUBLING_BYTES",
        None,
        "Largest all-reduce that `auto` does by `doubling` between hosts. With 3, 5, 6, 7 or 9 to 15 hosts the limit "
        "is a quarter of this value; with 64 to 95 hosts it is twice this value, with 96 to 127 three times, and so "
        "on, but less than a `ring_bytes` that is set. None: 64 KiB.",
        bytes_up_to("2GiB"),
    )
    ring_bytes: int | None = _setting(
        "RONDE_RING_BYTES",
        None,
        "Smallest all-reduce that `auto` does by `ring` between hosts. None: 64 KiB for each host, of more than 16.",
        bytes_up_to("2GiB"),
    )
    autotune: bool = _setting(
        "RONDE_AUTOTUNE",
        False,
        "Tune `fusion_bytes` and other settings while the job runs (docs/tuning.md).",
        FLAG,
        also="HOROVOD_AUTOTUNE",
    )
    autotune_log: str | None = _setting(
        "RONDE_AUTOTUNE_LOG",
        None,
        "CSV file to which rank 0 writes the settings and the speed of each trial.",
        FILE,
        also="HOROVOD_AUTOTUNE_LOG",
    )
    autotune_trials: int = _setting(
        "RONDE_AUTOTUNE_TRIALS",
        20,
        "Number of trials.",
        count_from(2, 1000),
        also="HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
    )
    autotune_samples: int = _setting(
        "RONDE_AUTOTUNE_SAMPLES",
        5,
        "Number of samples per trial. The median counts.",
        count_from(1, 1000),
    )
    autotune_steps_per_sample: int = _setting(
        "RONDE_AUTOTUNE_STEPS_PER_SAMPLE",
        10,
        "Smallest number of steps of the program per sample.",
        count_from(1, 10**6),
        also="HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
    )
    autotune_warmup_samples: int = _setting(
        "RONDE_AUTOTUNE_WARMUP_SAMPLES",
        3,
        "Number of samples to discard at the start.",
        count_from(0, 1000),
        also="HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
    )
    backends: str = _setting(
        "RONDE_BACKENDS",
        "native",
        "Libraries that carry the engine's tensors, in order of preference: one list (`gloo,native`), or a list per "
        "operation (`native;allreduce=mpi,native`). The first one that supports a tensor carries it "
        "(docs/backends.md).",
        LIST_OF_BACKENDS,
    )
    disable_group_fusion: bool = _setting(
        "RONDE_DISABLE_GROUP_FUSION",
        False,
        "Fuse the tensors of a group only with each other.",
        FLAG,
        also="HOROVOD_DISABLE_GROUP_FUSION",
    )
    join_average: str = _setting(
        "RONDE_JOIN_AVERAGE",
        "all",
        "Divisor of an average after some ranks have joined (run out of data): the number of `all` ranks, or of the "
        "ranks still `contributing`.",
        one_of("all", "contributing"),
    )
    stall_warning_ns: int = _setting(
        "RONDE_STALL_WARNING",
        10 * 10**9,
        "How long a tensor or call may wait for other ranks before Ronde reports it; 0: for ever (docs/stalls.md).",
        seconds_or("never"),
        also="HOROVOD_STALL_CHECK_TIME_SECONDS",
        off="HOROVOD_STALL_CHECK_DISABLE",
    )
    stall_shutdown_ns: int = _setting(
        "RONDE_STALL_SHUTDOWN",
        0,
        "How long a tensor or call may wait for other ranks before it fails on every rank; 0: for ever.",
        seconds_or("never"),
        also="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    )
    check_finite: str = _setting(
        "RONDE_CHECK_FINITE",
        "off",
        "Check tensors for NaN and infinity: `warn` logs the first one of each rank, `raise` aborts the job.",
        one_of("off", "warn", "raise"),
    )
    timeline: str | None = _setting(
        "RONDE_TIMELINE",
        None,
        "Directory for the timelines of all ranks from `init` on, or a file to whose name Ronde adds the rank.",
        ValueKind("a path, in which {rank} may stand for the rank", check=is_text),
        also="HOROVOD_TIMELINE",
    )
    timeline_mark_cycles: bool = _setting(
        "RONDE_TIMELINE_MARK_CYCLES",
        False,
        "Mark each negotiation round in the timeline.",
        FLAG,
        also="HOROVOD_TIMELINE_MARK_CYCLES",
    )
    log_level: str = _setting(
        "RONDE_LOG_LEVEL",
        "warning",
        "Lowest level that is logged.",
        LOG_LEVEL,
        also="HOROVOD_LOG_LEVEL",
        kind_also=LOG_LEVEL._replace(parse=horovods_log_level),
    )
    log_hide_time: bool = _setting(
        "RONDE_LOG_HIDE_TIME",
        False,
        "Omit the time from Ronde's log lines, which go to stderr if the program has no log handler.",
        FLAG,
        also="HOROVOD_LOG_HIDE_TIME",
    )
    thread_affinity: Sequence[int] | None = _setting(
        "RONDE_THREAD_AFFINITY",
        None,
        "Cores for Ronde's own threads, one for each rank of a host, in the order of local ranks.",
        CORES,
        also="HOROVOD_THREAD_AFFINITY",
    )
    # Not a setting: the names of those that the user has set.
    given: frozenset[str] = dataclasses.field(default=frozenset(), repr=False)


_FIELDS = {field.name: field for field in dataclasses.fields(Settings) if field.metadata}


def resolve(environ: Mapping[str, str], **arguments: object) -> Settings:
    """Return the settings: `arguments` (by field name, in the field's unit; None: not given) > RONDE_* > defaults.

    Raises UsageError that names the variable or argument, its value and the expected values. An unknown RONDE_*
    variable causes a warning with the nearest known name. An empty variable counts as not set.
    """
    _warn_of_unknown(environ)
    for name in arguments:
        if name not in _FIELDS:
            raise UsageError(f"unknown setting {name!r}" + _nearest(name, _FIELDS))
    values: dict[str, Any] = {}
    for name, field in _FIELDS.items():
        meta = field.metadata
        argument = arguments.get(name)
        if argument is not None:
            values[name] = _checked(field, argument)
            continue
        for variable in (meta["variable"], meta["off"], meta["also"]):
            text = environ.get(variable, "").strip()
            if text and (variable != meta["off"] or text.lower() in ("1", "true", "yes", "on")):
                kind = meta["kind_also" if variable == meta["also"] else "kind"]
                off = variable == meta["off"]
                values[name] = 0 if off else kind.read(text, _shown(field, variable, text))
                break
    return Settings(**values, given=frozenset(values))


def _checked(field: dataclasses.Field[Any], argument: object) -> object:
    kind: ValueKind = field.metadata["kind"]
    if field.name.endswith("_ns"):
        kind = kind._replace(right=f"{kind.right}, given in nanoseconds")
    if not kind.check(argument):
        raise kind.error(_shown(field, field.name, argument))
    return argument


def _shown(field: dataclasses.Field[Any], origin: str, given: object) -> str:
    secret = field.metadata["secret"]
    return f"{origin}={'(a value that is not shown)' if secret else repr(given)}"


# Variables of the launcher for workers, besides settings.
_OF_THE_LAUNCHER = (
    "RONDE_DRIVER_STORE",
    "RONDE_JOB_ID",
    "RONDE_MPI_PYTHON",
    "RONDE_MPI_TICKET",
    "RONDE_ROUND",
    "RONDE_TASK_ROWS",
)


def _warn_of_unknown(environ: Mapping[str, str]) -> None:
    known = [*(field.metadata["variable"] for field in _FIELDS.values()), *_OF_THE_LAUNCHER]
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            _warn(f"{name} is set, but Ronde has no such setting{_nearest(name, known)}")


@functools.cache  # warn once: settings are resolved repeatedly
def _warn(message: str) -> None:
    _log.warning("%s", message)


def ignored_horovod_variables(environ: Mapping[str, str]) -> list[str]:
    """Return Horovod's variables that are set, except those that a setting reads or a launcher sets for scripts."""
    taken = {field.metadata[each] for field in _FIELDS.values() for each in ("also", "off")}
    taken |= {f"HOROVOD_{place}{what}" for place in ("", "LOCAL_", "CROSS_") for what in ("RANK", "SIZE")}
    taken.add("HOROVOD_HOSTNAME")
    return sorted(
        name
        for name, text in environ.items()
        if name.startswith("HOROVOD_") and text.strip() and name not in taken
    )


def _nearest(name: str, known: Iterable[str]) -> str:
    by_rest = {each.removeprefix(PREFIX): each for each in known}  # the common prefix makes nothing similar
    near = difflib.get_close_matches(name.removeprefix(PREFIX), by_rest, n=1)
    return f"; did you mean {by_rest[near[0]]}?" if near else ""


def assignment(name: str, value: int) -> str:
    """Return the variable and value that set a setting, as `NAME=value`; `value` in the field's unit."""
    field = _FIELDS[name]
    text = seconds_text(value) if name.endswith("_ns") else str(value)
    return f"{field.metadata['variable']}={text}"
