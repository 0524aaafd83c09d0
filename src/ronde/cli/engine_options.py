"""The table of `ronde run`'s options that become settings of the workers (docs/settings.md) or have no effect.

An option overrides the configuration file, and both override the environment of `ronde run`.
"""

from __future__ import annotations

from ronde.cli.options import Option
from ronde.values import (
    CORES,
    LOG_LEVEL,
    MEBIBYTES,
    MILLISECONDS,
    PATH,
    PROTECTION,
    SECONDS,
    SHARE,
    ValueKind,
    count_from,
    one_of,
    seconds_or,
)

__all__ = ["ENGINE_OPTIONS"]

ENGINE, TUNING, WATCHING, OTHERS = "engine", "tuning", "timeline, stalls, logging", "accepted, without effect"

OURS = "Ronde's ranks negotiate by their own protocol"


_ENGINE = (
    Option(
        ENGINE,
        ("--fusion-threshold-mb",),
        "reduce small tensors together, up to this size in MiB; 0 disables fusion (default: 32)",
        metavar="MB",
        kind=MEBIBYTES,
        variable="RONDE_FUSION_BYTES",
        place="params.fusion_threshold_mb",
    ),
    Option(
        ENGINE,
        ("--cycle-time-ms",),
        "milliseconds for which the engine may wait for more small tensors to fuse, while no thread waits for one "
        "(default: 5)",
        metavar="MS",
        kind=MILLISECONDS,
        variable="RONDE_LINGER",
        place="params.cycle_time_ms",
    ),
    Option(
        ENGINE,
        ("--cache-capacity",),
        "number of named tensors that the engine remembers, so that they need no negotiation (default: 16384)",
        metavar="N",
        kind=count_from(0),
        variable="RONDE_CACHE_CAPACITY",
        place="params.cache_capacity",
    ),
    Option(
        ENGINE,
        ("--hierarchical-allreduce",),
        "reduce within each host first (--no-hierarchical-allreduce: never; default: depends on size and number of "
        "hosts)",
        off=("--no-hierarchical-allreduce",),
        variable="RONDE_ALLREDUCE_ALGORITHM",
        place="params.hierarchical_allreduce",
    ),
    Option(
        ENGINE,
        ("--hierarchical-allgather",),
        "gather through one rank of each host (--no-hierarchical-allgather: never; default: if all hosts have the same "
        "number of ranks)",
        off=("--no-hierarchical-allgather",),
        variable="RONDE_HIERARCHICAL_ALLGATHER",
        place="params.hierarchical_allgather",
    ),
    Option(
        ENGINE,
        ("--thread-affinity",),
        "cores for Ronde's own threads, in the order of local ranks: 0,1",
        metavar="CORES",
        kind=CORES,
        variable="RONDE_THREAD_AFFINITY",
        place="library_options.thread_affinity",
    ),
    Option(
        ENGINE,
        ("--protection",),
        "protection between machines, also of the connections of ronde run: messages: authenticate everything except "
        "tensors; payload: authenticate tensors, too; secret: also encrypt everything (default: messages)",
        metavar="WHAT",
        variable="RONDE_PROTECTION",
        place="protection",
        kind=PROTECTION,
    ),
    Option(
        ENGINE,
        ("--tcp",),
        "use only TCP between hosts: keeps NCCL from InfiniBand (Ronde's own links always use TCP)",
        variable="NCCL_IB_DISABLE",
    ),
)

_TUNING = (
    Option(
        TUNING,
        ("--autotune",),
        "tune the engine's settings while the job runs, and print the best (docs/tuning.md)",
        off=("--no-autotune",),
        common=True,
        variable="RONDE_AUTOTUNE",
        place="autotune.enabled",
    ),
    Option(
        TUNING,
        ("--autotune-log-file", "--autotune-log"),
        "write the settings and the speed of each trial to this CSV file; implies --autotune",
        metavar="FILE",
        kind=PATH,
        variable="RONDE_AUTOTUNE_LOG",
        place="autotune.log_file",
    ),
    Option(
        TUNING,
        ("--autotune-warmup-samples",),
        "number of samples to discard at the start (default: 3)",
        metavar="N",
        kind=count_from(0),
        variable="RONDE_AUTOTUNE_WARMUP_SAMPLES",
        place="autotune.warmup_samples",
    ),
    Option(
        TUNING,
        ("--autotune-steps-per-sample",),
        "smallest number of steps of the program per sample (default: 10)",
        metavar="N",
        kind=count_from(1),
        variable="RONDE_AUTOTUNE_STEPS_PER_SAMPLE",
        place="autotune.steps_per_sample",
    ),
    Option(
        TUNING,
        ("--autotune-bayes-opt-max-samples",),
        "number of trials (default: 20)",
        metavar="N",
        kind=count_from(2),
        variable="RONDE_AUTOTUNE_TRIALS",
        place="autotune.bayes_opt_max_samples",
    ),
)

_WATCHING = (
    Option(
        WATCHING,
        ("--timeline-filename",),
        "record a timeline of each rank: a directory, or a file to whose name Ronde adds the rank (docs/timeline.md)",
        metavar="PATH",
        kind=PATH._replace(right="a path, in which {rank} may stand for the rank"),
        common=True,
        variable="RONDE_TIMELINE",
        place="timeline.filename",
    ),
    Option(
        WATCHING,
        ("--timeline-mark-cycles",),
        "mark each negotiation round in the timeline",
        off=("--no-timeline-mark-cycles",),
        variable="RONDE_TIMELINE_MARK_CYCLES",
        place="timeline.mark_cycles",
    ),
    Option(
        WATCHING,
        ("--stall-check",),
        "report tensors and calls that wait long for other ranks (default; --no-stall-check: do not report)",
        off=("--no-stall-check",),
        variable="RONDE_STALL_WARNING",
        place="stall_check.enabled",
    ),
    Option(
        WATCHING,
        ("--stall-check-warning-time-seconds",),
        "seconds until the first report (default: 10)",
        metavar="S",
        kind=SECONDS,
        variable="RONDE_STALL_WARNING",
        place="stall_check.warning_time_seconds",
    ),
    Option(
        WATCHING,
        ("--stall-check-shutdown-time-seconds",),
        "seconds until a stalled job ends; 0: never (default: 0)",
        metavar="S",
        kind=seconds_or("never"),
        variable="RONDE_STALL_SHUTDOWN",
        place="stall_check.shutdown_time_seconds",
    ),
    Option(
        WATCHING,
        ("--check-finite",),
        "check tensors for NaN and infinity when a rank submits them: off; warn: log the first one of each rank; "
        "raise: end the job with rank, tensor and index of the first (default: off)",
        metavar="ACTION",
        variable="RONDE_CHECK_FINITE",
        place="check_finite",
        kind=one_of("off", "warn", "raise"),
    ),
    Option(
        WATCHING,
        ("--log-level",),
        "lowest level that is logged: debug (or trace), info, warning, error, critical (or fatal) (default: warning)",
        metavar="LEVEL",
        kind=LOG_LEVEL,
        variable="RONDE_LOG_LEVEL",
        place="logging.level",
    ),
    Option(
        WATCHING,
        ("--log-with-timestamp", "--no-log-hide-timestamp"),
        "start log lines with the time (default; --log-without-timestamp: without it)",
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
    return Option(OTHERS, names, why, metavar=metavar, kind=ValueKind(metavar and "a value"), refused=why)


_OTHERS = (
    _idle(
        ("--torus-allreduce",),
        "it arranges NCCL's rings; Ronde chooses the algorithm by size and number of hosts",
        off=("--no-torus-allreduce",),
        place="params.torus_allreduce",
    ),
    _idle(("--event-log-handler",), "Ronde has no torchrun events", "NAME", kind=one_of("null", "console")),
    _idle(
        ("--logs-specs",),
        "Ronde has one layout of log files",
        "NAME",
        kind=one_of("default", instead="--log-dir, --redirects and --tee say where output goes"),
    ),
    _idle(("--use-env",), "workers always find LOCAL_RANK in their environment"),
    _idle(("--gloo",), f"{OURS}; RONDE_BACKENDS=gloo uses Gloo for the tensors (docs/backends.md)"),
    _idle(
        ("--mpi",),
        f"{OURS}; --launcher mpi starts workers by mpirun, RONDE_BACKENDS=mpi uses MPI for the tensors",
    ),
    _idle(
        ("--verbose",),
        "important messages are always shown; --dry-run shows the plan, --log-level debug what the engine does",
    ),
    _idle(("--disable-cache",), "Ronde caches nothing about hosts between jobs"),
    _idle(
        ("--autotune-gaussian-process-noise",),
        "tuning measures the noise itself",
        "SHARE",
        kind=SHARE,
        place="autotune.gaussian_process_noise",
    ),
    _idle(
        ("--gloo-timeout-seconds",),
        "the setting RONDE_TIMEOUT limits how long a collective waits",
        "S",
        kind=SECONDS,
        place="library_options.gloo_timeout_seconds",
    ),
    _idle(
        ("--num-nccl-streams",),
        "the backend nccl has one stream",
        "N",
        kind=count_from(0),
        place="library_options.num_nccl_streams",
    ),
    _idle(
        ("--mpi-threads-disable",),
        "the engine has threads with and without MPI",
        off=("--no-mpi-threads-disable",),
        place="library_options.mpi_threads_disable",
    ),
    _refused(("--jsrun",), "start Ronde with jsrun itself, or name the hosts with -H"),
    _refused(
        ("--mpi-args",), "set mpirun's options in its environment variables, and use --launcher mpi", "WORDS"
    ),
    _refused(("--binding-args",), "use --bind cores or --bind numa to bind workers to processors", "WORDS"),
)

ENGINE_OPTIONS = _ENGINE + _TUNING + _WATCHING + _OTHERS
