"""The table of `ronde run`'s options for workers, machines, rendezvous and output.

Names and meanings are torchrun's and horovodrun's. The options of the engine are in `engine_options`.
"""

from __future__ import annotations

from typing import Any

from ronde.cli.options import Option
from ronde.values import (
    ADDRESS,
    COMMAND,
    COOLDOWN,
    FILE,
    INTERFACE,
    JOB_NAME,
    KEY_VALUES,
    LOCAL_RANKS,
    MODULES,
    NAMESPACE,
    NODE_RANGE,
    PATH,
    PORT,
    PORT_OR_ANY,
    POSITIVE_SECONDS,
    QUANTITY,
    SECONDS,
    SIGNALS,
    TEXTS,
    VARIABLE_NAMES,
    WORKER_COUNT,
    ValueKind,
    count_from,
    one_of,
    seconds_from,
)

__all__ = ["INFORMATION", "KUBERNETES", "LAUNCH_OPTIONS"]

WORKERS, PROGRAM, NODES = "workers", "what to run", "several machines, each with its own ronde run"
HOSTS, KUBERNETES = "several machines by SSH", "several machines on Kubernetes"
OUTPUT, INFORMATION = "output", "information"


def _streams(text: str) -> Any:
    from ronde.launch.config import parse_streams  # help does not need it

    return parse_streams(text)


_STREAMS = ValueKind(
    "0, 1 (stdout), 2 (stderr), 3 (both), or one of them for some local ranks, like 0:3,1:2", _streams
)

_WORKERS = (
    Option(
        WORKERS,
        ("-n", "-np", "--num-proc"),
        "number of workers that this command starts: on this machine, or with -H on all hosts together (default: 1)",
        metavar="N",
        kind=WORKER_COUNT,
        common=True,
    ),
    Option(
        WORKERS,
        ("--nproc-per-node",),
        "number of workers on each machine, or gpu (one per GPU), cpu (one per usable core), auto (gpu if the "
        "machine has GPUs, else cpu)",
        metavar="N",
        kind=WORKER_COUNT,
        common=True,
    ),
    Option(
        WORKERS,
        ("--max-restarts",),
        "how many times the job goes on after a worker fails (default: 0; with --min-np or spare workers: 100)",
        metavar="N",
        kind=count_from(0),
        common=True,
    ),
    Option(
        WORKERS,
        ("--reset-limit",),
        "how many times machines may come or go before the job ends (default: no limit)",
        metavar="N",
        kind=count_from(0),
    ),
    Option(
        WORKERS,
        ("--start-timeout",),
        "seconds for machines to answer, and for ranks to find each other (default: 300)",
        metavar="S",
        kind=POSITIVE_SECONDS,
        common=True,
    ),
    Option(
        WORKERS,
        ("--launcher",),
        "what starts the workers: local (ronde run), or mpi (the mpirun next to this Python, or in PATH) (default: "
        "local)",
        metavar="NAME",
        kind=one_of("local", "mpi"),
    ),
    Option(
        WORKERS,
        ("--job-key-by-descriptor",),
        "pass the job key to workers in a memory file that ronde.init() closes, not in their environment",
    ),
    Option(
        WORKERS,
        ("--role",),
        "name of the workers' role, which they find in ROLE_NAME (default: default)",
        metavar="NAME",
        kind=ValueKind("a name"),
    ),
    Option(
        WORKERS,
        ("--bind",),
        "bind each worker to processors: cores (an equal share of the usable cores), numa (the cores of one NUMA "
        "node) or none (default: none)",
        metavar="UNIT",
        kind=one_of("cores", "numa", "none"),
    ),
    Option(
        WORKERS,
        ("--numa-binding",),
        "torchrun's name for --bind: node and socket mean --bind numa, exclusive and core-complex mean --bind cores",
        metavar="MODE",
        kind=one_of("node", "socket", "exclusive", "core-complex"),
    ),
    Option(
        WORKERS,
        ("--preload",),
        "modules that a template process imports, so that workers start again faster; none: no template (default: "
        "the modules that the script imports)",
        metavar="NAMES",
        kind=MODULES,
    ),
    Option(
        WORKERS,
        ("--start-method",),
        "spawn: start new processes; fork or forkserver: fork workers from the template process, the first time "
        "too, after its imports (default: spawn)",
        metavar="METHOD",
        kind=one_of("spawn", "fork", "forkserver"),
    ),
    Option(
        WORKERS,
        ("--monitor-interval",),
        "seconds between checks for workers that are stopped (SIGSTOP); ronde run notices the end of a worker at "
        "once (default: 0.1)",
        metavar="S",
        kind=SECONDS,
    ),
    Option(
        WORKERS,
        ("--shutdown-timeout",),
        "seconds from SIGTERM to SIGKILL when workers have to end (default: 30 after a signal to ronde run, 5 after "
        "Ctrl-C, SIGQUIT or a failure)",
        metavar="S",
        kind=SECONDS,
    ),
    Option(
        WORKERS,
        ("--signals-to-handle",),
        "further signals that ronde run passes on to all workers and that end the job (always: SIGINT, SIGTERM, "
        "SIGHUP, SIGQUIT)",
        metavar="NAMES",
        kind=SIGNALS,
    ),
    Option(
        WORKERS,
        ("--virtual-local-rank",),
        "let each worker see only its own GPU, as device 0, with LOCAL_RANK=0",
    ),
)

_PROGRAM = (
    Option(
        PROGRAM,
        ("-m", "--module"),
        "run a Python module, as python -m does",
        common=True,
    ),
    Option(PROGRAM, ("--no-python",), "run the file as a program, even if its name ends in .py", common=True),
    Option(PROGRAM, ("--run-path",), "run the file with this Python, whatever its name ends in"),
    Option(
        PROGRAM,
        ("--horovod",),
        "provide horovod.torch, so that scripts for Horovod run unchanged",
        common=True,
    ),
)

_NODES = (
    Option(
        NODES,
        ("--nnodes",),
        "number of machines, or MIN:MAX: the job starts with MIN machines and grows up to MAX (default: 1)",
        metavar="N",
        kind=NODE_RANGE,
        common=True,
    ),
    Option(
        NODES,
        ("--rdzv-backend",),
        "how machines find each other: static (numbered by --node-rank), tcp (alias c10d), file, etcd, or an "
        "installed backend (default: tcp, or static with --master-addr or --node-rank)",
        metavar="NAME",
        kind=ValueKind("the name of a rendezvous backend"),
        common=True,
    ),
    Option(
        NODES,
        ("--rdzv-endpoint",),
        "where machines meet: HOST:PORT of one of them, the path of a shared file, or HOST:PORT of etcd",
        metavar="ENDPOINT",
        kind=ValueKind("an endpoint, like node1:29400"),
        common=True,
    ),
    Option(
        NODES,
        ("--rdzv-id",),
        "name of the job, which tells jobs at the same endpoint apart",
        metavar="NAME",
        kind=JOB_NAME,
    ),
    Option(
        NODES,
        ("--rdzv-conf",),
        "options of the rendezvous: join_timeout, last_call_timeout, keep_alive_interval (seconds), "
        "keep_alive_max_attempt, and those of the backend: a=1,b=2",
        metavar="KEY=VALUE,...",
        kind=KEY_VALUES,
    ),
    Option(
        NODES,
        ("--heartbeat-timeout",),
        "seconds after its last sign of life until the job goes on without a machine that is silent; its own workers "
        "end after three quarters of that time (default: 20)",
        metavar="S",
        kind=seconds_from("a number of seconds, 1 or more", 10**9),
    ),
    Option(
        NODES,
        ("--insecure-job-key",),
        "if no job key is set, use the job's name as the key: a stranger on the network who guesses the name can "
        "join and run programs here",
    ),
    Option(NODES, ("--standalone",), "run on one machine without a rendezvous, which is also the default"),
    Option(
        NODES,
        ("--node-rank",),
        "number of this machine, from 0: required by static, a preference for the other backends",
        metavar="N",
        kind=count_from(0),
        common=True,
    ),
    Option(
        NODES,
        ("--master-addr",),
        "address of machine 0, where the others find it; MASTER_ADDR of the workers",
        metavar="HOST",
        kind=ADDRESS,
        common=True,
    ),
    Option(
        NODES,
        ("--master-port",),
        "port on machine 0; MASTER_PORT of the workers (default: 29500; on one machine, or with 0, a free port)",
        metavar="PORT",
        kind=PORT_OR_ANY,
        common=True,
    ),
    Option(
        NODES,
        ("--local-addr",),
        "address at which other machines reach this one (default: the address of the interface that leads to them)",
        metavar="HOST",
        kind=ADDRESS,
    ),
    Option(
        NODES,
        ("--spares",),
        "number of machines beyond MAX that may wait to replace a lost one; on one machine, number of further workers "
        "that start and wait to replace a lost one (default: 0)",
        metavar="N",
        kind=count_from(0),
    ),
)

_HOSTS = (
    Option(
        HOSTS,
        ("-H", "--hosts"),
        "start workers on these hosts by SSH, with the number of slots of each: a:2,b:2; a host without a number "
        "has 1 slot",
        metavar="HOSTS",
        kind=ValueKind("hosts with their slots, like a:2,b:2"),
        common=True,
    ),
    Option(
        HOSTS,
        ("-hostfile", "--hostfile"),
        "file with one host per line: a slots=2",
        metavar="FILE",
        kind=FILE,
        common=True,
    ),
    Option(
        HOSTS,
        ("--host-discovery-script",),
        "program, with or without arguments, that prints the available hosts, one per line; ronde run calls it "
        "every second and adds and removes hosts",
        metavar="FILE",
        kind=COMMAND,
    ),
    Option(
        HOSTS,
        ("--slots", "--slots-per-host"),
        "slots of a host that the discovery script prints without a number (default: 1)",
        metavar="N",
        kind=count_from(1),
    ),
    Option(
        HOSTS,
        ("--min-np", "--min-num-proc"),
        "smallest number of workers with which the job continues (default: the value of -n); without a list of hosts, "
        "only workers that use ronde.elastic continue with fewer",
        metavar="N",
        kind=count_from(1),
    ),
    Option(
        HOSTS,
        ("--max-np", "--max-num-proc"),
        "largest number of workers (default: the number of all slots)",
        metavar="N",
        kind=count_from(1),
    ),
    Option(
        HOSTS,
        ("--blacklist-cooldown-range",),
        "seconds until a failed host is tried again, MIN the first time, doubled each time up to MAX (default: "
        "never tried again)",
        metavar="MIN MAX",
        words=2,
        kind=COOLDOWN,
    ),
    Option(
        HOSTS,
        ("--elastic-timeout",),
        "seconds to wait for enough hosts (default: 600)",
        metavar="S",
        kind=SECONDS,
    ),
    Option(
        HOSTS,
        ("--network-interface", "--network-interfaces"),
        "network interface, by name, of all connections between machines",
        metavar="NAME",
        kind=INTERFACE,
        adds=True,
    ),
    Option(
        HOSTS,
        ("-x", "--export"),
        "environment variables that workers on all hosts get, besides those that ronde run always passes on: A,B",
        metavar="NAMES",
        kind=VARIABLE_NAMES,
        adds=True,
    ),
    Option(
        HOSTS,
        ("-p", "--ssh-port"),
        "port of SSH on all hosts (default: from the SSH configuration)",
        metavar="PORT",
        kind=PORT,
    ),
    Option(
        HOSTS,
        ("-i", "--ssh-identity-file"),
        "private key for SSH (default: from the SSH configuration)",
        metavar="FILE",
        kind=PATH,
    ),
)

_KUBERNETES = (
    Option(
        KUBERNETES,
        ("--cluster",),
        "submit the job to a cluster: kubernetes (by kubectl)",
        metavar="NAME",
        kind=one_of("kubernetes"),
        common=True,
    ),
    Option(
        KUBERNETES,
        ("--image",),
        "container image with Ronde and the program",
        metavar="IMAGE",
        kind=ValueKind("the name of an image", check=lambda text: bool(text.strip())),
        common=True,
    ),
    Option(
        KUBERNETES,
        ("--job-name",),
        "name of the job and all its objects (default: the script's name and some random letters)",
        metavar="NAME",
        kind=JOB_NAME,
    ),
    Option(
        KUBERNETES,
        ("--namespace",),
        "namespace of the job (default: that of kubectl)",
        metavar="NAME",
        kind=NAMESPACE,
    ),
    Option(
        KUBERNETES,
        ("--gpus",),
        "NVIDIA GPUs of each Pod, and its number of workers without --nproc-per-node (default: 0)",
        metavar="N",
        kind=count_from(0),
        common=True,
    ),
    Option(
        KUBERNETES,
        ("--cpus",),
        "processors that each Pod requests, like 8 or 500m",
        metavar="N",
        kind=QUANTITY,
    ),
    Option(
        KUBERNETES,
        ("--memory",),
        "memory that each Pod requests, and its limit, like 64Gi",
        metavar="SIZE",
        kind=QUANTITY,
    ),
    Option(
        KUBERNETES,
        ("--shm-size",),
        "size of /dev/shm in each Pod, like 8Gi (default: as large as the Pod's memory)",
        metavar="SIZE",
        kind=QUANTITY,
    ),
    Option(
        KUBERNETES,
        ("--patch",),
        "file with fields to merge into the manifest, in YAML (needs PyYAML) or JSON",
        metavar="FILE",
        kind=FILE,
    ),
    Option(
        KUBERNETES,
        ("--kubernetes-kind",),
        "job (an Indexed Job), or jobset (needs the JobSet controller) (default: job)",
        metavar="KIND",
        kind=one_of("job", "jobset"),
    ),
    Option(
        KUBERNETES,
        ("--manifest",),
        "write the manifest, with the job's key, into this file (-: onto the screen), and submit nothing",
        metavar="FILE",
        kind=FILE,
    ),
    Option(
        KUBERNETES,
        ("--detach",),
        "submit the job and end; without it, ronde run shows the output of all Pods and ends with the job",
    ),
)

_OUTPUT = (
    Option(
        OUTPUT,
        ("--log-dir",),
        "directory for files with the workers' output, with a subdirectory for each run, attempt and worker",
        metavar="DIR",
        kind=PATH,
        common=True,
    ),
    Option(
        OUTPUT,
        ("-r", "--redirect", "--redirects"),
        "streams that go into files instead of onto the screen: 1 stdout, 2 stderr, 3 both; or by local rank: "
        "0:3,1:2",
        metavar="STREAMS",
        kind=_STREAMS,
    ),
    Option(
        OUTPUT,
        ("-t", "--tee"),
        "streams that go into files and onto the screen, with the values of --redirects",
        metavar="STREAMS",
        kind=_STREAMS,
        common=True,
    ),
    Option(
        OUTPUT,
        ("--local-ranks-filter",),
        "show only the output of workers with these local ranks: 0,2",
        metavar="RANKS",
        kind=LOCAL_RANKS,
    ),
    *(
        Option(
            OUTPUT,
            (f"--duplicate-{stream}-filters",),
            f"also collect the lines of {stream} that contain one of these texts, in filtered_{stream}.log: a,b",
            metavar="TEXTS",
            kind=TEXTS,
        )
        for stream in ("stdout", "stderr")
    ),
    Option(
        OUTPUT,
        ("--output-filename",),
        "show all output, and write it to files as horovodrun does: DIR/rank.R/stdout and stderr",
        metavar="DIR",
        kind=PATH,
    ),
    Option(
        OUTPUT,
        ("--prefix",),
        "text before each line on the screen, in which {rank}, {local_rank}, {host}, {role} and {stream} are "
        "replaced",
        metavar="TEXT",
        kind=ValueKind("a text like '{host}/{rank}: '"),
    ),
    Option(
        OUTPUT,
        ("-prefix-timestamp", "--prefix-output-with-timestamp"),
        "start each line on the screen with the time",
    ),
)

_INFORMATION = (
    Option(INFORMATION, ("--dry-run",), "print what would start, and start nothing", common=True),
    Option(
        INFORMATION,
        ("--config-file",),
        "read options from this YAML file, under horovodrun's names (needs PyYAML)",
        metavar="FILE",
        kind=FILE,
    ),
    Option(INFORMATION, ("-cb", "--check-build"), "print the available frameworks, backends and launchers"),
    Option(INFORMATION, ("-v", "--version"), "print the version"),
    Option(INFORMATION, ("-h",), "print the most common options", common=True),
    Option(INFORMATION, ("--help",), "print all options", common=True),
)

LAUNCH_OPTIONS = _WORKERS + _PROGRAM + _NODES + _HOSTS + _KUBERNETES + _OUTPUT + _INFORMATION
