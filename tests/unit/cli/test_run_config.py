"""From the options of `ronde run` to the launch configuration, and the errors for contradictions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ronde.cli.run import describe_launch
from ronde.cli.run_arguments import parse_arguments
from ronde.cli.run_config import configure
from ronde.cli.run_here import Here
from ronde.errors import UsageError
from ronde.launch.config import Binding, Discovery, LaunchConfig, RendezvousConfig, Ssh, Std

SECOND = 10**9


def config(
    line: str, *, cores: int = 4, gpus: int = 0, hostfile: str = "", **environment: str
) -> LaunchConfig:
    asked = parse_arguments([*line.split(), "train.py"], environment)
    return configure(asked, ["/bin/python", "train.py"], Here(environment, cores, gpus, hostfile))


def meeting(line: str) -> RendezvousConfig:
    return config(line).rendezvous


def test_without_options_there_is_one_worker_here() -> None:
    plain = config("")
    assert (plain.worker.argv, plain.worker.slots) == (("/bin/python", "train.py"), 1)
    assert plain.rendezvous == RendezvousConfig()
    # As torchrun takes it.
    assert plain == config("--standalone --rdzv-endpoint localhost:0 --rdzv-backend c10d")
    assert plain == config("--standalone") == config("--nnodes 1") == config("--rdzv-backend c10d")
    assert plain.rendezvous.backend == "alone"


@pytest.mark.parametrize(
    ("line", "gpus", "slots"),
    [
        ("-n 3", 0, 3),
        ("--nproc-per-node 3", 0, 3),
        ("-n 3 --nproc-per-node 3", 0, 3),
        ("-n auto", 0, 4),
        ("-n auto", 2, 2),
        ("-n cpu", 2, 4),
        ("--nproc-per-node gpu", 2, 2),
    ],
)
def test_how_many_workers(line: str, gpus: int, slots: int) -> None:
    assert config(line, gpus=gpus).worker.slots == slots


@pytest.mark.parametrize(
    ("line", "restarts", "min_slots", "spares", "all_slots"),
    [
        ("-n 4 --min-np 2", 100, 2, 0, 0),
        ("-n 4 --min-np 2 --max-restarts 3", 3, 2, 0, 0),
        ("-n 4 --spares 2", 100, 0, 2, 0),
        ("-n 4 --max-restarts 1", 1, 0, 0, 0),
        ("-n 4 --nnodes 1:2 --rdzv-endpoint a --min-np 4", 100, 1, 0, 4),
        ("-n 4 --nnodes 1:2 --rdzv-endpoint a --spares 1", 0, 0, 0, 0),
    ],
)
def test_what_workers_that_continue_may_do(
    line: str, restarts: int, min_slots: int, spares: int, all_slots: int
) -> None:
    found = config(line)
    worker = found.worker
    assert (worker.max_restarts, worker.min_slots, worker.spares) == (restarts, min_slots, spares)
    assert found.rendezvous.min_slots == all_slots


@pytest.mark.parametrize(
    ("line", "backend", "endpoint", "nodes", "rank"),
    [
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint a:1", "c10d", "a:1", (2, 2), -1),
        ("--nnodes 2 --rdzv-endpoint a", "tcp", "a:29400", (2, 2), -1),
        ("--nnodes 1:3 --rdzv-endpoint [fd00::1]", "tcp", "[fd00::1]:29400", (1, 3), -1),
        (
            "--nnodes 1:3 --rdzv-endpoint [::1]:7 --node-rank 2 --rdzv-backend tcp",
            "tcp",
            "[::1]:7",
            (1, 3),
            2,
        ),
        ("--nnodes 2 --rdzv-endpoint a:1 --node-rank 0", "static", "a:1", (2, 2), 0),
        ("--nnodes 2 --master-addr a --node-rank 1", "static", "a:29500", (2, 2), 1),
        ("--nnodes 2 --master-addr ::1 --master-port 5", "static", "[::1]:5", (2, 2), 0),
        ("--nnodes 2 --rdzv-backend file --rdzv-endpoint /f", "file", "/f", (2, 2), -1),
        (
            "--nnodes 2 --rdzv-endpoint /f --rdzv-backend c10d --rdzv-conf store_type=file",
            "file",
            "/f",
            (2, 2),
            -1,
        ),
        ("--rdzv-endpoint /f --rdzv-backend c10d --rdzv-conf store_type=FiLe", "file", "/f", (1, 1), -1),
        ("--nnodes 2 --rdzv-backend etcd --rdzv-endpoint http://e:2379", "etcd", "http://e:2379", (2, 2), -1),
        ("--nnodes 2 --rdzv-backend etcd --rdzv-endpoint e:1,f:2", "etcd", "e:1,f:2", (2, 2), -1),
        ("--rdzv-backend tcp --rdzv-endpoint a:1", "tcp", "a:1", (1, 1), -1),
        ("--rdzv-backend c10d --rdzv-endpoint localhost:0", "alone", "", (1, 1), -1),
        ("--master-port 5", "alone", "", (1, 1), -1),
        ("--master-port 0", "alone", "", (1, 1), -1),
        ("-H a:2,b:2", "tcp", "", (2, 2), -1),
        ("-H a:2,b:2 --rdzv-backend etcd --rdzv-endpoint e:2379", "etcd", "e:2379", (2, 2), -1),
        ("-H a:2,b:2 --nnodes 2", "tcp", "", (2, 2), -1),
        ("-H a:2,b:2 -n 4 --min-np 2", "tcp", "", (1, 2), -1),
    ],
)
def test_where_machines_meet(
    line: str, backend: str, endpoint: str, nodes: tuple[int, int], rank: int
) -> None:
    found = meeting(line)
    assert (found.backend, found.endpoint, found.node_rank) == (backend, endpoint, rank)
    assert (found.min_nodes, found.max_nodes) == nodes


def test_where_the_workers_of_one_machine_meet_is_theirs() -> None:
    one = config("--master-addr 127.0.0.2 --master-port 5")
    assert (one.master_addr, one.master_port) == ("127.0.0.2", 5)
    assert config("--master-addr a --local-addr b").master_addr == "a"
    assert config("--local-addr [::1] --master-port 0").master_addr == "::1"
    assert config("--local-addr b --rdzv-endpoint a:1").master_addr == "b"
    assert config("--local-addr b --rdzv-endpoint a:1 --rdzv-backend static").master_addr is None
    assert config("--master-port 0").master_port is None
    two = config("--nnodes 2 --master-addr a --master-port 5")  # that is where the agents meet
    assert (two.master_addr, two.master_port) == (None, None)


def test_times_come_from_options_and_variables() -> None:
    found = meeting(
        "--nnodes 2 --rdzv-endpoint a --rdzv-id job --spares 1 "
        "--rdzv-conf join_timeout=7,last_call_timeout=0.5,keep_alive_interval=1,keep_alive_max_attempt=4,is_host=1"
    )
    assert (found.run_id, found.spares, found.options["is_host"]) == ("job", 1, "1")
    assert (found.join_timeout_ns, found.last_call_ns) == (7 * SECOND, SECOND // 2)
    assert (found.heartbeat_ns, found.missing_heartbeats) == (SECOND, 4)
    found = meeting("--nnodes 2 --rdzv-endpoint a --heartbeat-timeout 2")
    assert (found.heartbeat_ns, found.missing_heartbeats) == (SECOND // 2, 3)
    assert meeting("--nnodes 2 --rdzv-endpoint a --heartbeat-timeout 20") == meeting(
        "--nnodes 2 --rdzv-endpoint a"
    )
    assert meeting("--rdzv-endpoint a --nnodes 2").run_id == "none"
    assert meeting("--rdzv-endpoint a --nnodes 2 --rdzv-conf rehost=false").options == {"rehost": "false"}
    assert config("", HOROVOD_ELASTIC_TIMEOUT="8").rendezvous.join_timeout_ns == 8 * SECOND
    assert config("", RONDE_START_TIMEOUT="9").start_timeout_ns == 9 * SECOND
    assert config("--start-timeout 3", RONDE_START_TIMEOUT="9").start_timeout_ns == 3 * SECOND


def test_options_name_hosts_and_their_slots() -> None:
    assert config("-H a:2,b:2").hosts == (("a", 2), ("b", 2))
    assert config("-H a:2,b:2 -np 3").hosts == (("a", 2), ("b", 1))
    assert config("-H a,b --nproc-per-node 4").hosts == (("a", 4), ("b", 4))
    assert config("--hostfile h", hostfile="a slots=2\nb:1\n").hosts == (("a", 2), ("b", 1))
    assert config("-H a -p 2222 -i /k").ssh == Ssh(2222, "/k")
    assert config("-H a --network-interfaces eth0").interface == "eth0"
    some = config(
        "--host-discovery-script /s --slots 2 -np 4 --max-np 8 --blacklist-cooldown-range 1 2 --reset-limit 3"
    )
    assert some.discovery == Discovery("/s", 2, first_workers=4)
    assert some.cooldown_ns == (SECOND, 2 * SECOND)
    assert (some.min_workers, some.max_workers, some.worker.max_changes) == (4, 8, 3)
    assert some.rendezvous.min_nodes == 1


def test_workers_and_output() -> None:
    found = config(
        "--role r --max-restarts 2 --bind numa --preload a,b --shutdown-timeout 2 -n 2 -r 3 -t 0:1,1:0"
    )
    spec = found.worker
    assert (spec.role, spec.max_restarts, spec.binding, spec.preload) == ("r", 2, Binding.NUMA, ("a", "b"))
    assert (spec.patience_ns, spec.farewell_ns) == (2 * SECOND, 2 * SECOND)
    assert found.outputs.redirects == {-1: Std.ALL}
    assert found.outputs.tee == {0: Std.OUT, 1: Std.NONE}
    assert config("--preload none").worker.preload == ()
    assert config("--start-method forkserver").worker.fork
    assert config("--start-method spawn") == config("")
    assert config("--numa-binding exclusive").worker.binding is Binding.CORES
    assert sorted(config("--signals-to-handle SIGUSR1,TERM").worker.signals) == [1, 2, 3, 10, 15]
    horovods = config("--output-filename /o --prefix-output-with-timestamp").outputs
    assert (horovods.log_dir, horovods.tee, horovods.timestamps) == ("/o", {-1: Std.ALL}, True)
    assert horovods.by_rank
    chosen = config("--duplicate-stdout-filters loss,a,,b, --duplicate-stderr-filters ,").outputs
    assert chosen.duplicates == {Std.OUT: ("loss", "a,b")}
    template = "[${role_name}:${rank}]"  # torchrun's
    assert config("", TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=template).outputs.prefix == "[{role}:{rank}]"


@pytest.mark.parametrize(
    ("line", "variable", "seconds"),
    [("", "", (5, 30)), ("", "7", (7, 7)), ("--shutdown-timeout 2", "7", (2, 2))],
)
def test_how_long_workers_may_take_to_end(line: str, variable: str, seconds: tuple[int, int]) -> None:
    spec = config(line, TORCH_ELASTIC_SHUTDOWN_TIMEOUT=variable).worker
    assert (spec.patience_ns // SECOND, spec.farewell_ns // SECOND) == seconds


def test_an_elastic_job_takes_all_slots() -> None:
    """As with horovodrun, the job begins with the number of -n."""
    assert config("-H a:2,b:2 -np 2 --min-np 2").hosts == (("a", 2), ("b", 2))
    assert config("-H a:2,b:2 -np 2").hosts == (("a", 2),)


def test_a_short_wait_for_others_has_a_shorter_last_call() -> None:
    line = "--nnodes 1:2 --rdzv-endpoint a --rdzv-conf join_timeout=5"
    assert meeting(line).last_call_ns == 5 * SECOND // 2
    assert meeting(f"{line},last_call_timeout=4").last_call_ns == 4 * SECOND
    torchruns = meeting("--nnodes 1:2 --rdzv-endpoint a --rdzv-conf timeout=5")
    assert (torchruns.join_timeout_ns, torchruns.last_call_ns) == (35 * SECOND, 30 * SECOND)
    assert meeting("--nnodes 2 --rdzv-endpoint a --rdzv-conf timeout=5").join_timeout_ns == 5 * SECOND


def test_each_worker_needs_a_gpu_if_it_is_to_see_no_other() -> None:
    assert config("--virtual-local-rank -n 2", CUDA_VISIBLE_DEVICES="1,2").worker.virtual_local_rank
    with pytest.raises(UsageError, match="start fewer workers, or name more"):
        config("--virtual-local-rank -n 2", CUDA_VISIBLE_DEVICES="1")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--nnodes 4:2", "--nnodes 4:2 contradicts itself: the smaller number comes first, as in 2:4"),
        (
            "--nnodes 2",
            "2 machines need an endpoint: give --master-addr HOST and --node-rank N, or",
        ),
        ("--nnodes 2 --rdzv-backend static --node-rank 1", "2 machines need an endpoint"),
        (
            "--nnodes 1:2 --master-addr a",
            "a static rendezvous has a fixed number of machines, not --nnodes 1:2",
        ),
        ("--standalone --nnodes 2", "--standalone and --nnodes 2 contradict each other"),
        ("--standalone -H a:2", "--standalone and -H contradict each other"),
        ("-H a:2 --hostfile h", "-H and --hostfile contradict each other"),
        ("-H a:2 --host-discovery-script s", "-H and --host-discovery-script contradict each other"),
        (
            "--nnodes 2 --master-addr a --node-rank 2",
            "--node-rank 2 is out of range: 2 machines are numbered from 0",
        ),
        (
            "--node-rank 1",
            "--node-rank 1 is out of range: there is one machine, number 0; --nnodes says how many",
        ),
        ("-np 5 -H a:2,b:2", "5 workers need 5 slots, but a:2,b:2 has 4"),
        ("-H a:2 --nproc-per-node 4", "--nproc-per-node 4 contradicts a:2: leave it out"),
        ("-H a:2,b:2 --nnodes 3", "--nnodes and a list of hosts contradict each other"),
        ("-H a:2 --node-rank 0", "--node-rank and a list of hosts contradict each other"),
        (
            "-H a:2 --rdzv-backend static",
            "a list of hosts needs no static rendezvous: leave --rdzv-backend out",
        ),
        ("-H a:2,a:1", "-H a:2,a:1: a is listed twice"),
        ("-H a:x", "-H a:x: 'a:x' is invalid: expected a whole number of slots"),
        ("--hostfile h", "there is no host in h: write one on each line"),
        ("-n gpu", "-n gpu: this machine has no usable GPU; give a number of workers, or cpu"),
        ("-n 2 --nproc-per-node 3", "-n 2 and --nproc-per-node 3 contradict each other"),
        ("-n 4 --max-np 8", "--max-np needs a list of hosts: add -H"),
        ("--nproc-per-node 2 --min-np 4", "--min-np 4 is more than the 2 workers of this machine"),
        ("-n 4 --min-np 5", "--min-np 5 is more than -n 4: expected min <= number <= max"),
        ("-H a:4 -np 2 --min-np 3", "--min-np 3 is more than -np 2: expected min <= number <= max"),
        ("-H a:4 --min-np 3 --max-np 2", "--min-np 3 is more than --max-np 2"),
        ("--slots 3", "--slots needs hosts that come and go: add --host-discovery-script"),
        (
            "--rdzv-backend c10 --rdzv-endpoint a",
            "--rdzv-backend c10 is not known; did you mean c10d? (available: alone,",
        ),
        ("--nnodes 2 --rdzv-backend etcd", "the rendezvous etcd needs an endpoint"),
        (
            "--nnodes 2 --rdzv-backend file",
            "the rendezvous file needs an endpoint: give --rdzv-endpoint the path",
        ),
        (
            "--nnodes 2 --rdzv-endpoint a:0",
            "--rdzv-endpoint a:0 is invalid: the other machines have to know the port",
        ),
        (
            "--nnodes 2 --rdzv-endpoint a:1,b:1",
            "--rdzv-endpoint a:1,b:1 names several endpoints, but the machines must meet at one: give one of them",
        ),
        ("--nnodes 2 --rdzv-endpoint a:b", "--rdzv-endpoint a:b is invalid: expected HOST:PORT"),
        (
            "--nnodes 2 --rdzv-endpoint http://a:1",
            "--rdzv-endpoint http://a:1 is invalid: expected HOST:PORT",
        ),
        ("--nnodes 2 --rdzv-endpoint ::1:4", "--rdzv-endpoint ::1:4 is invalid: expected HOST:PORT"),
        (
            "--rdzv-conf timeout=soon",
            "--rdzv-conf timeout=soon is invalid: expected a number of seconds",
        ),
        (
            "--rdzv-conf last_call_timeot=3 --nnodes 2 --rdzv-endpoint a",
            "--rdzv-conf last_call_timeot=3: last_call_timeot is not known; did you mean last_call_timeout?",
        ),
        (
            "--rdzv-conf exit_barrier=5 --nnodes 2 --rdzv-endpoint a",
            "--rdzv-conf exit_barrier=5: exit_barrier is not known; did you mean exit_barrier_timeout?",
        ),
        ("--rdzv-conf keep_alive_max_attempt=0", "--rdzv-conf keep_alive_max_attempt=0 is invalid"),
        (
            "--heartbeat-timeout 0.5",
            "--heartbeat-timeout 0.5 is invalid: expected a number of seconds, 1 or more",
        ),
        (
            "--heartbeat-timeout 4 --rdzv-conf keep_alive_interval=1 --nnodes 2 --rdzv-endpoint a",
            "--heartbeat-timeout and --rdzv-conf keep_alive_interval contradict each other: give one of them",
        ),
        (
            "--rdzv-conf keep_alive_interval=0",
            "--rdzv-conf keep_alive_interval=0 is invalid: expected a number of seconds, 0.1 or more",
        ),
        *(
            (f"--rdzv-conf {conf}", f"--rdzv-conf {conf} is invalid: expected {right}")
            for conf, right in (
                ("is_host=maybe", "1 or 0, true or false, yes or no, on or off"),
                ("rehost=1.5", "1 or 0, true or false, yes or no, on or off"),
                ("read_timeout=-10", "a number of seconds above 0"),
                ("heartbeat_timeout=0", "a number of seconds above 0"),
                ("close_timeout=x", "a number of seconds above 0"),
                ("rank=-1", "a whole number from 0"),
            )
        ),
        (
            f"--nnodes 2 --rdzv-endpoint a --rdzv-id {'x' * 300}",
            f"--rdzv-id {'x' * 300} is invalid: expected a name of at most 200 bytes",
        ),
        ("--start-timeout -3", "--start-timeout -3 is invalid: expected a number of seconds above 0"),
        ("--start-timeout 0", "--start-timeout 0 is invalid: expected a number of seconds above 0"),
        (
            "--monitor-interval -1",
            "--monitor-interval -1 is invalid: expected a number of seconds, 0 or more",
        ),
        ("--rdzv-conf join_timeout=0.0", "--rdzv-conf join_timeout=0.0 is invalid"),
        (
            "--rdzv-conf store_type=dummy --nnodes 2 --rdzv-endpoint a",
            "--rdzv-conf store_type=dummy is invalid: expected tcp or file",
        ),
        (
            "--nnodes 2 --master-addr a --master-port 0",
            "--master-port 0 is invalid: the other machines have to know the port",
        ),
        ("-n 2 -t 2:3", "-t names local rank 2, but 2 workers are numbered from 0 to 1"),
        (
            "--network-interfaces a,b",
            "--network-interfaces a,b names several: Ronde uses one network interface",
        ),
        ("--launcher mpi -H a:2", "--launcher mpi starts workers on this machine only"),
        (
            "--nnodes 2 --node-rank 1 --master-addr a:29500",
            "--master-addr a:29500 is invalid: expected a host name or an address; the port is that of",
        ),
        ("-n 2 --local-ranks-filter 2,3", "--local-ranks-filter names no existing worker, so no output"),
        ("--bind numa --numa-binding node", "--bind and --numa-binding contradict each other"),
        ("--log-dir a --output-filename b", "--log-dir and --output-filename contradict each other"),
    ],
)
def test_contradictions_are_one_sentence(line: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        config(line)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("WORLD_SIZE", "ronde run sets WORLD_SIZE for each worker: leave it out"),
        ("RONDE_JOB_KEY", "ronde run sets RONDE_JOB_KEY for each worker: leave it out"),
        ("MASTER_PORT", "x is invalid: expected a port from 1 to 65535"),
    ],
)
def test_what_a_worker_is_cannot_be_passed_on(name: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        config(f"-x {name}", WORLD_SIZE="x", RONDE_JOB_KEY="x", MASTER_PORT="x")
    assert str(caught.value) == f"-x {name}: {message}"
    assert config("-x MASTER_PORT", MASTER_PORT="7").worker.environment == {"MASTER_PORT": "7"}


def test_a_variable_is_called_by_its_name() -> None:
    with pytest.raises(UsageError, match=r"^PET_NODE_RANK 5 is out of range"):
        config("", PET_NODE_RANK="5", PET_NNODES="2", PET_MASTER_ADDR="a")
    with pytest.raises(UsageError, match=r"^PET_HOSTS a:0: 'a:0' is invalid"):
        config("", PET_HOSTS="a:0")
    with pytest.raises(
        UsageError, match=r"^RONDE_START_TIMEOUT=x is invalid: expected a number of seconds above 0"
    ):
        config("", RONDE_START_TIMEOUT="x")


def test_a_handler_of_torchruns_is_refused_by_what_it_is() -> None:
    asked = parse_arguments(["--rdzv-backend", "theirs", "--nnodes", "2", "--rdzv-endpoint", "a", "t.py"], {})
    here = Here({}, 4, torchruns_handlers=["theirs"])
    with pytest.raises(
        UsageError, match=r"theirs is a rendezvous handler of torchrun's \(entry point torchrun.handlers"
    ):
        configure(asked, ["/bin/python", "t.py"], here)


def test_a_file_of_horovodruns(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "c.yaml"
    file.write_text(
        "controller: gloo\nparams:\n  fusion_threshold_mb: 4\n  cache-capacity: 9\n  hierarchical_allreduce: true\n"
        "autotune:\n  enabled: true\n  log_file: /a.csv\ntimeline:\n  filename: /t\nstall_check:\n  enabled: false\n"
        "logging:\n  level: INFO\n  with_timestamp: false\nnum_proc: 3\nmax-restarts: 2\nrole:\n"
    )
    found = config(f"--config-file {file} --cache-capacity 5 -n 2", HOROVOD_FUSION_THRESHOLD="77")
    assert found.worker.environment == {
        # The file goes before the environment, and the command line before both.
        "RONDE_FUSION_BYTES": str(4 * 2**20),
        "RONDE_CACHE_CAPACITY": "5",
        "RONDE_ALLREDUCE_ALGORITHM": "hierarchical",
        "RONDE_AUTOTUNE": "1",
        "RONDE_AUTOTUNE_LOG": "/a.csv",
        "RONDE_TIMELINE": "/t",
        "RONDE_STALL_WARNING": "0",
        "RONDE_LOG_LEVEL": "info",
        "RONDE_LOG_HIDE_TIME": "1",
    }
    assert (found.worker.slots, found.worker.max_restarts) == (2, 2)
    # Older names.
    file.write_text("library_options:\n  ccl_bgt_affinity: 1\nlogging:\n  hide_timestamp: true\n")
    assert config(f"--config-file {file}", PET_ROLE="r") == config(
        "", PET_CONFIG_FILE=str(file), PET_ROLE="r"
    )
    former = {"RONDE_THREAD_AFFINITY": "1", "RONDE_LOG_HIDE_TIME": "1"}
    assert config(f"--config-file {file}").worker.environment == former
    file.write_text("hosts: [a:1, b:2]\n")
    assert config(f"--config-file {file}").hosts == (("a", 1), ("b", 2))
    file.write_text("hosts: [a:1]\n", encoding="utf-8-sig")
    assert config(f"--config-file {file}").hosts == (("a", 1),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "params:\n  fusion_treshold_mb: 4",
            "params.fusion_treshold_mb in {} is not known; did you mean params.fusion",
        ),
        ("nnode: 4", "nnode in {} is not known; did you mean nnodes?"),
        ("nnodes: x", "nnodes in {}: x is invalid: expected a whole number above 0"),
        ("standalone: 3", "standalone in {}: 3 is invalid: expected true or false"),
        ("controller: x", "controller in {}: x is invalid: expected gloo or mpi"),
        ("params: 3", "params in {}: 3 is invalid: expected names and values, indented"),
        ("help: true", "help in {} is not known"),
        ("- a", "{} should hold names and values, like `nnodes: 2`, not a list"),
        ("a: [", "{} is not YAML: while parsing"),
    ],
)
def test_files_that_make_no_sense(text: str, message: str, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        config(f"--config-file {file}")
    assert str(caught.value).startswith(message.format(file))


def test_files_that_are_not_there(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    with pytest.raises(UsageError, match=r"^cannot read the configuration file .*/no.yaml: No such file"):
        config(f"--config-file {tmp_path}/no.yaml")


def test_the_plan_shows_everything_but_the_key() -> None:
    line = (
        "--nnodes 2:3 --rdzv-endpoint a:1 --rdzv-id job --spares 1 --max-restarts 1 --log-dir /l -t 0:3 -n 2"
    )
    shown = describe_launch(config(f"{line} --local-ranks-filter 0 --cache-capacity 7"), {})
    assert (
        shown
        == """\
2 workers on this machine, which is one of 2 to 3
rendezvous: tcp at a:1, named job
    machines: 2 to 3, and 1 spare
    waits 600 s for enough of them, then 30 s for more
    the others go on without one that is silent for 20 s
after a failure: all workers are started again, 1 time at most
log directory: /l
    into files too: stdout and stderr of local rank 0
shown: only local ranks 0

its command:
    /bin/python train.py

environment of every worker, besides the variables for its rank:
    RONDE_CACHE_CAPACITY=7
    RONDE_JOB_KEY=<hidden>
"""
    )
    shown = describe_launch(config("-H a:2,b:2 -np 3 -p 22"), {})
    assert shown.startswith(
        "3 workers on 2 hosts\nhost a: 2 workers\nhost b: 1 worker\nreached by ssh, port 22\nrendezvous: tcp at "
    )
    shown = describe_launch(config("-n 2 --max-restarts 3"), {})
    assert shown.startswith("2 workers on this machine\n")
    assert "RONDE_JOB_KEY=<hidden>\n" in shown
    assert shown.endswith("after a failure: all workers are started again, 3 times at most\n")


def test_what_is_here() -> None:
    """In a new process, because it loads every framework."""
    command = [sys.executable, "-m", "ronde", "run", "--check-build"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.startswith("Ronde ")
    assert "    [X] native: shared memory and TCP\n" in done.stdout
    assert "    [ ] TensorFlow: " in done.stdout
