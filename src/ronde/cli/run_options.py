"""The options of `ronde run` that say what is started, where, and what becomes of its output: a table.

Names and meanings are torchrun's and horovodrun's. The other half, about the engine, is in `engine_options`.
"""

from __future__ import annotations

from ronde.cli.options import Option
from ronde.cli.run_values import (
    SIGNALS,
    at_least,
    cooldown,
    distinct,
    key_values,
    names,
    node_range,
    one_of,
    path,
    port,
    port_or_any,
    program,
    ranks,
    run_id,
    seconds,
    signals,
    streams,
    texts,
    variable_names,
    workers,
)

__all__ = ["LAUNCH_OPTIONS"]

WORKERS, PROGRAM, NODES = "workers", "what to run", "several machines, each with its own ronde run"
HOSTS, OUTPUT, INFORMATION = "several machines by SSH", "output", "information"

SECONDS = "a number of seconds"
STREAMS = "0, 1 (stdout), 2 (stderr), 3 (both), or one of them for some local ranks, like 0:3,1:2"
A_PATH = "a path"

_WORKERS = (
    Option(
        WORKERS,
        ("-n", "-np", "--num-proc"),
        "how many workers this command starts: on this machine, or with -H on all hosts together (default: 1)",
        metavar="N",
        parse=workers,
        right="a whole number above 0, or auto, gpu or cpu",
        common=True,
    ),
    Option(
        WORKERS,
        ("--nproc-per-node",),
        "how many on each machine; gpu: one for each GPU; cpu: one for each usable core; auto: gpu if there are "
        "any, else cpu",
        metavar="N",
        parse=workers,
        right="a whole number above 0, or auto, gpu or cpu",
        common=True,
    ),
    Option(
        WORKERS,
        ("--max-restarts",),
        "how often all workers are started again after one has failed (default: 0)",
        metavar="N",
        **at_least("0"),
        common=True,
    ),
    Option(
        WORKERS,
        ("--launcher",),
        "who starts them: local, or mpi for the mpirun beside this Python or in PATH (default: local)",
        metavar="WHO",
        **one_of("local", "mpi"),
    ),
    Option(
        WORKERS,
        ("--job-key-by-descriptor",),
        "hand workers the job's key in a memory file that ronde.init() closes, not in their environment",
    ),
    Option(
        WORKERS, ("--role",), "what the workers are called (default: default)", metavar="NAME", right="a name"
    ),
    Option(
        WORKERS,
        ("--bind",),
        "to which processors each worker is bound: cores (an equal share of the usable ones), numa (those of a "
        "NUMA node) or none (default)",
        metavar="TO",
        **one_of("cores", "numa", "none"),
    ),
    Option(
        WORKERS,
        ("--numa-binding",),
        "torchrun's name for it: node and socket are --bind numa, exclusive and core-complex are --bind cores",
        metavar="MODE",
        **one_of("node", "socket", "exclusive", "core-complex"),
    ),
    Option(
        WORKERS,
        ("--preload",),
        "modules that a template process imports, so that workers are started again faster; none: no template "
        "(default: what the script imports)",
        metavar="NAMES",
        parse=names,
        right="names of modules with commas between them, or none",
    ),
    Option(
        WORKERS,
        ("--start-method",),
        "fork or forkserver: workers come from the template the first time too, which waits for its imports "
        "(default: spawn)",
        metavar="HOW",
        **one_of("spawn", "fork", "forkserver"),
    ),
    Option(
        WORKERS,
        ("--monitor-interval",),
        "how often to look whether somebody has stopped a worker; its end is noticed at once (default: 0.1)",
        metavar="S",
        parse=seconds,
        right=SECONDS,
    ),
    Option(
        WORKERS,
        ("--shutdown-timeout",),
        "how long workers may take to end after a signal, before they are killed (default: 30 if it was sent to ronde "
        "run, 5 after Ctrl-C, SIGQUIT or a failure)",
        metavar="S",
        parse=seconds,
        right=SECONDS,
    ),
    Option(
        WORKERS,
        ("--signals-to-handle",),
        "signals that are passed on to all workers and end the job, beside SIGINT, SIGTERM, SIGHUP and SIGQUIT",
        metavar="NAMES",
        parse=signals,
        right=f"some of {', '.join(SIGNALS)}, with commas between them",
    ),
    Option(
        WORKERS,
        ("--virtual-local-rank",),
        "each worker sees only its own GPU, as the first one, and LOCAL_RANK=0",
    ),
)

_PROGRAM = (
    Option(
        PROGRAM,
        ("-m", "--module"),
        "the name is that of a Python module, as in python -m",
        common=True,
    ),
    Option(PROGRAM, ("--no-python",), "run the file itself, even if it ends in .py", common=True),
    Option(PROGRAM, ("--run-path",), "run the file with this Python, whatever it ends in"),
    Option(
        PROGRAM,
        ("--horovod",),
        "import horovod.torch is answered by Ronde, so that scripts for Horovod run unchanged",
        common=True,
    ),
)

_NODES = (
    Option(
        NODES,
        ("--nnodes",),
        "how many machines take part; MIN:MAX: the job begins with MIN and grows up to MAX (default: 1)",
        metavar="N",
        parse=node_range,
        right="a whole number above 0, or two of them like 1:4",
        common=True,
    ),
    Option(
        NODES,
        ("--rdzv-backend",),
        "where machines meet: static (numbered by --node-rank), tcp (or c10d, the same), file, etcd, or one that "
        "is installed (default: tcp, or static with --master-addr or --node-rank)",
        metavar="NAME",
        right="the name of a rendezvous backend",
        common=True,
    ),
    Option(
        NODES,
        ("--rdzv-endpoint",),
        "the place: HOST:PORT of one of the machines, the path of a file, or etcd's HOST:PORT",
        metavar="WHERE",
        right="a place, like node1:29400",
        common=True,
    ),
    Option(
        NODES,
        ("--rdzv-id",),
        "the name of the job, for jobs that meet at one place",
        metavar="NAME",
        parse=run_id,
        right="a name of at most 200 bytes",
    ),
    Option(
        NODES,
        ("--rdzv-conf",),
        "join_timeout, last_call_timeout, keep_alive_interval (seconds), keep_alive_max_attempt, and what the "
        "backend takes: a=1,b=2",
        metavar="A=B,...",
        parse=key_values,
        right="names and values, like join_timeout=60,last_call_timeout=5",
    ),
    Option(
        NODES,
        ("--insecure-job-key",),
        "without a job key, let the job's name stand for it: a stranger on the network who guesses the name can "
        "join and run programs here",
    ),
    Option(NODES, ("--standalone",), "one machine, without a place to meet; that is the default, too"),
    Option(
        NODES,
        ("--node-rank",),
        "which of the machines this is, counted from 0 (with static; others take it as a wish)",
        metavar="N",
        **at_least("0"),
        common=True,
    ),
    Option(
        NODES,
        ("--master-addr",),
        "the address of machine 0, where the others find it, and MASTER_ADDR of the workers",
        metavar="HOST",
        right="a host name or an address",
        common=True,
    ),
    Option(
        NODES,
        ("--master-port",),
        "a port there, MASTER_PORT of the workers (default: 29500; on one machine a free one, as with 0)",
        metavar="PORT",
        parse=port_or_any,
        right="a port from 1 to 65535, or 0 for a free one",
        common=True,
    ),
    Option(
        NODES,
        ("--local-addr",),
        "the address by which other machines reach this one (default: that of the interface that leads to them)",
        metavar="HOST",
        right="a host name or an address",
    ),
    Option(
        NODES,
        ("--spares",),
        "how many machines more than MAX may wait for another to fail (default: 0)",
        metavar="N",
        **at_least("0"),
    ),
)

_HOSTS = (
    Option(
        HOSTS,
        ("-H", "--hosts"),
        "start workers on these machines, so many on each: a:2,b:2; a host without a number has one slot",
        metavar="HOSTS",
        right="hosts with their slots, like a:2,b:2",
        common=True,
    ),
    Option(
        HOSTS,
        ("-hostfile", "--hostfile"),
        "the same from a file, a line for each host: a slots=2",
        metavar="FILE",
        right=A_PATH,
        common=True,
    ),
    Option(
        HOSTS,
        ("--host-discovery-script",),
        "a program, perhaps with arguments, that prints the hosts that are there now, asked again and again: the job "
        "grows and shrinks with them",
        metavar="FILE",
        parse=program,
        right="the path of a program, or a command",
    ),
    Option(
        HOSTS,
        ("--slots", "--slots-per-host"),
        "slots of a host that the script prints without a number (default: 1)",
        metavar="N",
        **at_least("1"),
    ),
    Option(
        HOSTS,
        ("--min-np", "--min-num-proc"),
        "go on as long as there are so many workers (default: N)",
        metavar="N",
        **at_least("1"),
    ),
    Option(
        HOSTS,
        ("--max-np", "--max-num-proc"),
        "start at most so many (default: as many as there are slots)",
        metavar="N",
        **at_least("1"),
    ),
    Option(
        HOSTS,
        ("--blacklist-cooldown-range",),
        "how long a host that failed is left alone, at first and at most (default: for good)",
        metavar="MIN MAX",
        words=2,
        parse=cooldown,
        right="two numbers of seconds, the smaller one first, like 10 300",
    ),
    Option(
        HOSTS,
        ("--reset-limit",),
        "how often hosts may come and go before the job ends (default: no limit)",
        metavar="N",
        **at_least("0"),
    ),
    Option(
        HOSTS,
        ("--elastic-timeout",),
        "how long to wait for enough hosts (default: 600)",
        metavar="S",
        parse=seconds,
        right=SECONDS,
    ),
    Option(
        HOSTS,
        ("--start-timeout",),
        "how long hosts may take to answer, and ranks to find each other (default: 300)",
        metavar="S",
        parse=seconds,
        right=SECONDS,
        common=True,
    ),
    Option(
        HOSTS,
        ("--network-interface", "--network-interfaces"),
        "the network interface (by name) of all connections between machines",
        metavar="NAME",
        parse=distinct,
        right="the name of one network interface, like eth0",
        adds=True,
    ),
    Option(
        HOSTS,
        ("-x", "--export"),
        "variables of this environment that workers on all hosts get, beside those that always travel: A,B",
        metavar="NAMES",
        parse=variable_names,
        right="names of variables with commas between, like HF_HOME,TOKEN",
        adds=True,
    ),
    Option(
        HOSTS,
        ("-p", "--ssh-port"),
        "the port of ssh on all hosts (default: what ssh is configured for)",
        metavar="PORT",
        parse=port,
        right="a port from 1 to 65535",
    ),
    Option(
        HOSTS,
        ("-i", "--ssh-identity-file"),
        "the private key for ssh (default: what ssh is configured for)",
        metavar="FILE",
        parse=path,
        right=A_PATH,
    ),
)

_OUTPUT = (
    Option(
        OUTPUT,
        ("--log-dir",),
        "a directory for files with the workers' output: a directory in it for each run, attempt and worker",
        metavar="DIR",
        parse=path,
        right=A_PATH,
        common=True,
    ),
    Option(
        OUTPUT,
        ("-r", "--redirect", "--redirects"),
        "which streams go into files instead of the screen: 1 stdout, 2 stderr, 3 both; or 0:3,1:2 by local rank",
        metavar="WHICH",
        parse=streams,
        right=STREAMS,
    ),
    Option(
        OUTPUT,
        ("-t", "--tee"),
        "which streams go into files and onto the screen",
        metavar="WHICH",
        parse=streams,
        right=STREAMS,
        common=True,
    ),
    Option(
        OUTPUT,
        ("--local-ranks-filter",),
        "show only what workers with these local ranks say: 0,2",
        metavar="RANKS",
        parse=ranks,
        right="local ranks with commas between them, like 0,2",
    ),
    *(
        Option(
            OUTPUT,
            (f"--duplicate-{stream}-filters",),
            f"collect lines of {stream} that contain one of these texts in a file filtered_{stream}.log, too: a,b",
            metavar="TEXTS",
            parse=texts,
            right="texts with commas between them, like error,loss",
        )
        for stream in ("stdout", "stderr")
    ),
    Option(
        OUTPUT,
        ("--output-filename",),
        "show all output, and write it as horovodrun does: DIR/rank.R/stdout and stderr",
        metavar="DIR",
        parse=path,
        right=A_PATH,
    ),
    Option(
        OUTPUT,
        ("--prefix",),
        "what stands before each line: {rank}, {local_rank}, {host} and {role} are filled in",
        metavar="TEXT",
        right="a text like '{host}/{rank}: '",
    ),
    Option(
        OUTPUT,
        ("-prefix-timestamp", "--prefix-output-with-timestamp"),
        "each line begins with the time",
    ),
)

_INFORMATION = (
    Option(INFORMATION, ("--dry-run",), "print what would be started, and start nothing", common=True),
    Option(
        INFORMATION,
        ("--config-file",),
        "take options from this YAML file, with horovodrun's names (needs PyYAML)",
        metavar="FILE",
        right=A_PATH,
    ),
    Option(INFORMATION, ("-cb", "--check-build"), "print which frameworks and backends are here"),
    Option(INFORMATION, ("-v", "--version"), "print the version"),
    Option(INFORMATION, ("-h",), "print the options that are used most", common=True),
    Option(INFORMATION, ("--help",), "print all options", common=True),
)

LAUNCH_OPTIONS = _WORKERS + _PROGRAM + _NODES + _HOSTS + _OUTPUT + _INFORMATION
