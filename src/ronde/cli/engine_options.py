"""The options of `ronde run` that become settings of the workers (docs/settings.md), and those that mean nothing here.

An option goes before a configuration file, and both before a setting that the environment of `ronde run` has.
"""

from __future__ import annotations

from ronde.cli.options import Option
from ronde.cli.run_values import (
    at_least,
    level,
    megabytes,
    milliseconds,
    one_of,
    path,
    plain_seconds,
    ranks,
    seconds,
    whole,
)

__all__ = ["ENGINE_OPTIONS"]

ENGINE, TUNING, WATCHING, OTHERS = "engine", "tuning", "timeline, stalls, logging", "accepted, without effect"

A_PATH = "the path of a file"
OURS = "Ronde's ranks agree by a way of its own"


def _texts(numbers: str) -> str:
    return numbers if ranks(numbers) is not None else ""


def _number(text: str) -> str:
    return str(whole(text))


def _share(text: str) -> str:
    if not 0 <= float(text) <= 1:
        raise ValueError(text)
    return text


_ENGINE = (
    Option(
        ENGINE,
        ("--fusion-threshold-mb",),
        "small tensors are reduced together, up to so many MiB; 0 fuses nothing (default: 32)",
        metavar="MB",
        parse=megabytes,
        right="a whole number of MiB",
        variable="RONDE_FUSION_BYTES",
        place="params.fusion_threshold_mb",
    ),
    Option(
        ENGINE,
        ("--cycle-time-ms",),
        "how long the engine may wait for more small tensors to fuse, while nobody waits for one (default: 5)",
        metavar="MS",
        parse=milliseconds,
        right="a number of milliseconds up to 1000",
        variable="RONDE_LINGER",
        place="params.cycle_time_ms",
    ),
    Option(
        ENGINE,
        ("--cache-capacity",),
        "how many named tensors need no negotiation (default: 1024)",
        metavar="N",
        parse=_number,
        right="a whole number from 0",
        variable="RONDE_CACHE_CAPACITY",
        place="params.cache_capacity",
    ),
    Option(
        ENGINE,
        ("--hierarchical-allreduce",),
        "reduce within each host first, or never do (default: by size and number of hosts)",
        off=("--no-hierarchical-allreduce",),
        variable="RONDE_ALLREDUCE_ALGORITHM",
        place="params.hierarchical_allreduce",
    ),
    Option(
        ENGINE,
        ("--hierarchical-allgather",),
        "gather through one rank of each host, or never do (default: where hosts have equally many ranks)",
        off=("--no-hierarchical-allgather",),
        variable="RONDE_HIERARCHICAL_ALLGATHER",
        place="params.hierarchical_allgather",
    ),
    Option(
        ENGINE,
        ("--thread-affinity",),
        "cores for the threads of Ronde itself, in the order of local ranks: 0,1",
        metavar="CORES",
        parse=_texts,
        right="the numbers of cores, one for each worker of a machine, like 0,1",
        variable="RONDE_THREAD_AFFINITY",
        place="library_options.thread_affinity",
    ),
    Option(
        ENGINE,
        ("--tcp",),
        "between hosts only TCP, which is Ronde's own way anyhow: for NCCL, which has others",
        variable="NCCL_IB_DISABLE",
    ),
)

_TUNING = (
    Option(
        TUNING,
        ("--autotune",),
        "find out during the run which settings of the engine are best, and print them (docs/tuning.md)",
        off=("--no-autotune",),
        common=True,
        variable="RONDE_AUTOTUNE",
        place="autotune.enabled",
    ),
    Option(
        TUNING,
        ("--autotune-log-file", "--autotune-log"),
        "write what was tried, and how fast it was, into this CSV file; implies --autotune",
        metavar="FILE",
        parse=path,
        right=A_PATH,
        variable="RONDE_AUTOTUNE_LOG",
        place="autotune.log_file",
    ),
    Option(
        TUNING,
        ("--autotune-warmup-samples",),
        "how many samples at the beginning do not count (default: 3)",
        metavar="N",
        parse=_number,
        right="a whole number from 0",
        variable="RONDE_AUTOTUNE_WARMUP_SAMPLES",
        place="autotune.warmup_samples",
    ),
    Option(
        TUNING,
        ("--autotune-steps-per-sample",),
        "how many steps of the program a sample lasts at least (default: 10)",
        metavar="N",
        parse=_number,
        right="a whole number from 1",
        variable="RONDE_AUTOTUNE_STEPS_PER_SAMPLE",
        place="autotune.steps_per_sample",
    ),
    Option(
        TUNING,
        ("--autotune-bayes-opt-max-samples",),
        "how many values of the settings are tried (default: 20)",
        metavar="N",
        parse=_number,
        right="a whole number from 2",
        variable="RONDE_AUTOTUNE_TRIALS",
        place="autotune.bayes_opt_max_samples",
    ),
)

_WATCHING = (
    Option(
        WATCHING,
        ("--timeline-filename",),
        "record a timeline of each rank here: a directory, or a file whose name gets the rank (docs/timeline.md)",
        metavar="PATH",
        parse=path,
        right="a path, in which {rank} may stand for the rank",
        common=True,
        variable="RONDE_TIMELINE",
        place="timeline.filename",
    ),
    Option(
        WATCHING,
        ("--timeline-mark-cycles",),
        "with a tick for every decision of what runs next",
        off=("--no-timeline-mark-cycles",),
        variable="RONDE_TIMELINE_MARK_CYCLES",
        place="timeline.mark_cycles",
    ),
    Option(
        WATCHING,
        ("--stall-check",),
        "report tensors and calls that wait long for other ranks, or do not (default: report)",
        off=("--no-stall-check",),
        variable="RONDE_STALL_WARNING",
        place="stall_check.enabled",
    ),
    Option(
        WATCHING,
        ("--stall-check-warning-time-seconds",),
        "how long they may wait before that (default: 10)",
        metavar="S",
        parse=plain_seconds,
        right="a number of seconds",
        variable="RONDE_STALL_WARNING",
        place="stall_check.warning_time_seconds",
    ),
    Option(
        WATCHING,
        ("--stall-check-shutdown-time-seconds",),
        "after how long the job is ended; 0: never (default)",
        metavar="S",
        parse=plain_seconds,
        right="a number of seconds, 0 for never",
        variable="RONDE_STALL_SHUTDOWN",
        place="stall_check.shutdown_time_seconds",
    ),
    Option(
        WATCHING,
        ("--check-finite",),
        "check what ranks submit to the engine for NaN and infinities: off (default); warn, which logs the first of a "
        "rank; raise, which ends the job with rank, tensor and index of the first",
        metavar="WHAT",
        variable="RONDE_CHECK_FINITE",
        place="check_finite",
        **one_of("off", "warn", "raise"),
    ),
    Option(
        WATCHING,
        ("--log-level",),
        "what is logged: debug (or trace), info, warning (default), error, critical (or fatal)",
        metavar="LEVEL",
        parse=level,
        right="debug, info, warning, error or critical",
        variable="RONDE_LOG_LEVEL",
        place="logging.level",
    ),
    Option(
        WATCHING,
        ("--log-with-timestamp", "--no-log-hide-timestamp"),
        "log lines begin with the time (default), or do not",
        off=("--log-without-timestamp", "--log-hide-timestamp"),
        variable="RONDE_LOG_HIDE_TIME",
        place="logging.with_timestamp",
    ),
)


def _idle(
    names: tuple[str, ...], why: str, metavar: str = "", off: tuple[str, ...] = (), **more: object
) -> Option:
    return Option(OTHERS, names, why, metavar=metavar, off=off, idle=why, **more)  # type: ignore[arg-type]


def _refused(names: tuple[str, ...], why: str, metavar: str = "") -> Option:
    return Option(OTHERS, names, why, metavar=metavar, right=metavar and "a value", refused=why)


_OTHERS = (
    _idle(
        ("--torus-allreduce",),
        "it arranges NCCL's rings; Ronde chooses by size and number of hosts",
        off=("--no-torus-allreduce",),
        place="params.torus_allreduce",
    ),
    _idle(("--event-log-handler",), "there are no torchrun events", "NAME", **one_of("null", "console")),
    _idle(
        ("--logs-specs",),
        "there is one layout of files",
        "NAME",
        **one_of("default", instead="--log-dir, --redirects and --tee say where output goes"),
    ),
    _idle(("--use-env",), "workers find LOCAL_RANK in their environment anyhow"),
    _idle(("--gloo",), f"{OURS}; its own links or a backend carry the tensors (docs/backends.md)"),
    _idle(("--mpi",), f"{OURS}; --launcher mpi starts workers by mpirun, RONDE_BACKENDS=mpi uses MPI"),
    _idle(
        ("--verbose",),
        "what matters is said anyhow; --dry-run shows the plan, --log-level debug what the engine does",
    ),
    _idle(("--disable-cache",), "nothing about hosts is kept from one job to the next"),
    _idle(
        ("--autotune-gaussian-process-noise",),
        "tuning measures the noise by itself",
        "SHARE",
        parse=_share,
        right="a number from 0 to 1",
        place="autotune.gaussian_process_noise",
    ),
    _idle(
        ("--gloo-timeout-seconds",),
        "the setting RONDE_TIMEOUT says how long a collective waits",
        "S",
        parse=seconds,
        right="a number of seconds",
        place="library_options.gloo_timeout_seconds",
    ),
    _idle(
        ("--num-nccl-streams",),
        "the backend nccl has one stream",
        "N",
        **at_least("0"),
        place="library_options.num_nccl_streams",
    ),
    _idle(
        ("--mpi-threads-disable",),
        "the engine has threads with and without MPI",
        off=("--no-mpi-threads-disable",),
        place="library_options.mpi_threads_disable",
    ),
    _refused(("--jsrun",), "start Ronde by jsrun, or name the hosts with -H"),
    _refused(("--mpi-args",), "set what mpirun reads from its environment, and use --launcher mpi", "WORDS"),
    _refused(("--binding-args",), "--bind cores and --bind numa bind workers to processors", "WORDS"),
)

ENGINE_OPTIONS = _ENGINE + _TUNING + _WATCHING + _OTHERS
