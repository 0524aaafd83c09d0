"""Arguments of `ronde` and `ronde run`, valid and invalid."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ronde.cli import main
from ronde.cli.engine_options import ENGINE_OPTIONS
from ronde.cli.options import Option
from ronde.cli.run import find_command
from ronde.cli.run_arguments import OPTIONS, RunArguments, parse_arguments
from ronde.cli.run_config import idle_options, idle_variables, worker_settings
from ronde.errors import UsageError
from ronde.launch.config import Std
from ronde.settings import resolve

SECOND = 10**9
NO_LOGS_SPECS = "default; --log-dir, --redirects and --tee say where output goes"
SIGNALS = (
    "some of SIGHUP, SIGINT, SIGQUIT, SIGUSR1, SIGUSR2, SIGALRM, SIGTERM, SIGURG, SIGXCPU, SIGPWR, with commas between "
    "them"
)


def parse(line: str, **environment: str) -> RunArguments:
    return parse_arguments(line.split(), environment)


@pytest.mark.parametrize(
    ("line", "name", "arguments", "values"),
    [
        ("train.py", "train.py", (), {}),
        ("-n 4 train.py", "train.py", (), {"--num-proc": 4}),
        ("-n4 train.py", "train.py", (), {"--num-proc": 4}),
        ("-n=4 train.py", "train.py", (), {"--num-proc": 4}),
        ("-np 4 train.py", "train.py", (), {"--num-proc": 4}),
        ("-np=4 train.py", "train.py", (), {"--num-proc": 4}),
        ("--num-proc 4 train.py", "train.py", (), {"--num-proc": 4}),
        ("--nproc-per-node 4 train.py", "train.py", (), {"--nproc-per-node": 4}),
        ("--nproc_per_node=gpu train.py", "train.py", (), {"--nproc-per-node": "gpu"}),
        ("-n 2 -n 3 train.py", "train.py", (), {"--num-proc": 3}),
        ("train.py -n 4 --help", "train.py", ("-n", "4", "--help"), {}),
        ("-n 2 -- train.py --x", "train.py", ("--x",), {"--num-proc": 2}),
        ("-n 2 train.py -- x", "train.py", ("--", "x"), {"--num-proc": 2}),
        ("-- -odd.py", "-odd.py", (), {}),
        ("-m package.train -n 4", "package.train", ("-n", "4"), {"--module": True}),
        ("--no_python ./run.py x", "./run.py", ("x",), {"--no-python": True}),
        ("--nnodes 2:4 t.py", "t.py", (), {"--nnodes": (2, 4)}),
        (
            "-r 3 -t 0:1,1:2 t.py",
            "t.py",
            (),
            {"--redirects": {-1: Std.ALL}, "--tee": {0: Std.OUT, 1: Std.ERR}},
        ),
        ("--local_ranks_filter=0,2 t.py", "t.py", (), {"--local-ranks-filter": frozenset({0, 2})}),
        ("--rdzv-conf a=1,b=2 t.py", "t.py", (), {"--rdzv-conf": {"a": "1", "b": "2"}}),
        ("--rdzv-conf='a=1,b=2' t.py", "t.py", (), {"--rdzv-conf": {"a": "1", "b": "2"}}),
        ("--redirect=3 t.py", "t.py", (), {"--redirects": {-1: Std.ALL}}),
        ("--signals-to-handle usr1,SIGTERM t.py", "t.py", (), {"--signals-to-handle": (10, 15)}),
        ("-Ha:2,b t.py", "t.py", (), {"--hosts": "a:2,b"}),
        ("-hostfile h t.py", "t.py", (), {"--hostfile": "h"}),
        ("-p 22 -i/k t.py", "t.py", (), {"--ssh-port": 22, "--ssh-identity-file": "/k"}),
        (
            "--blacklist-cooldown-range 1.5 30 t.py",
            "t.py",
            (),
            {"--blacklist-cooldown-range": (3 * SECOND // 2, 30 * SECOND)},
        ),
        (
            "--blacklist_cooldown_range=1 30 t.py",
            "t.py",
            (),
            {"--blacklist-cooldown-range": (SECOND, 30 * SECOND)},
        ),
        ("--no-autotune t.py", "t.py", (), {"--autotune": False}),
        ("-x A,B -xC --export=A t.py", "t.py", (), {"--export": ("A", "B", "C", "A")}),
        (
            "--network-interface a --network-interface b,a t.py",
            "t.py",
            (),
            {"--network-interfaces": "a,b"},
        ),
        ("-prefix-timestamp t.py", "t.py", (), {"--prefix-output-with-timestamp": True}),
    ],
)
def test_arguments(line: str, name: str, arguments: tuple[str, ...], values: dict[str, object]) -> None:
    asked = parse(line)
    assert (asked.name, asked.arguments) == (name, arguments)
    assert {option: given.value for option, given in asked.given.items()} == values


LEAVE = "leave one of them out"
COOLDOWN = "two numbers of seconds, 0 or more, the smaller one first, like 10 300"
COUNT = "expected a whole number above 0, or auto, gpu or cpu"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--launcher slurm train.py", "--launcher slurm is invalid: expected local or mpi"),
        ("-n 0 train.py", f"-n 0 is invalid: {COUNT}"),
        ("-n -3 train.py", f"-n -3 is invalid: {COUNT}"),
        ("-n x train.py", f"-n x is invalid: {COUNT}"),
        ("-n 2.0 train.py", f"-n 2.0 is invalid: {COUNT}"),
        ("-n ²  train.py", f"-n ² is invalid: {COUNT}"),
        ("-nmu 4 train.py", f"-n mu is invalid: {COUNT}"),
        ("--nproc_per_node=0 train.py", f"--nproc_per_node 0 is invalid: {COUNT}"),
        ("-np", "-np needs a value: a whole number above 0, or auto, gpu or cpu"),
        ("--nmu 4 train.py", "unknown option --nmu; did you mean --num-proc?"),
        ("--dryrun train.py", "unknown option --dryrun; did you mean --dry-run?"),
        ("--nproc 4 train.py", "unknown option --nproc; did you mean --nproc-per-node?"),
        ("--rdzv-backnd tcp train.py", "unknown option --rdzv-backnd; did you mean --rdzv-backend?"),
        ("--no-autotun train.py", "unknown option --no-autotun; did you mean --no-autotune?"),
        ("--zzz train.py", "unknown option --zzz"),
        ("--dry-run=yes train.py", "--dry-run takes no value, but was given 'yes'"),
        ("", "no script given: write, for example, ronde run -n 4 train.py"),
        ("-n 2 --", "no script given: write, for example, ronde run -n 4 train.py"),
        ("-m", "no module given: write, for example, ronde run -n 4 train.py"),
        (
            "-m --no-python x",
            f"-m and --no-python contradict each other, because a module can only be run by Python: {LEAVE}",
        ),
        (
            "--nnodes 0 t.py",
            "--nnodes 0 is invalid: expected a whole number above 0, or two of them like 1:4",
        ),
        (
            "--master-port 65536 t.py",
            "--master-port 65536 is invalid: expected a port from 1 to 65535, or 0 for a free one",
        ),
        (
            "--blacklist-cooldown-range 30 10 t.py",
            f"--blacklist-cooldown-range 30 10 is invalid: expected {COOLDOWN}",
        ),
        (
            "--blacklist-cooldown-range 30",
            f"--blacklist-cooldown-range needs a value: {COOLDOWN}",
        ),
        (
            "--jsrun t.py",
            "--jsrun is not supported: start Ronde with jsrun itself, or name the hosts with -H",
        ),
        (
            "--logs-specs x t.py",
            f"--logs-specs x is invalid: expected {NO_LOGS_SPECS}",
        ),
        (
            "--signals-to-handle SIGTERM,SIGKILL t.py",
            f"--signals-to-handle SIGTERM,SIGKILL is invalid: expected {SIGNALS}",
        ),
        (
            "--signals-to-handle SIGWINCH t.py",
            f"--signals-to-handle SIGWINCH is invalid: expected {SIGNALS}",
        ),
        (
            "--log-level loud t.py",
            "--log-level loud is invalid: expected debug, info, warning, error or critical",
        ),
    ],
)
def test_a_mistake_is_a_sentence_with_what_is_expected(line: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(line)
    assert str(caught.value) == message


def test_the_command_line_goes_before_variables() -> None:
    asked = parse(
        "--nnodes 2 t.py", PET_NNODES="3", PET_RDZV_ENDPOINT="a:1", PET_ROLE=" ", PET_STANDALONE="0"
    )
    assert asked.value("--nnodes") == (2, 2)
    assert (asked.value("--rdzv-endpoint"), asked.origin("--rdzv-endpoint")) == ("a:1", "PET_RDZV_ENDPOINT")
    assert not asked.has("--standalone", "--role")


@pytest.mark.parametrize("flag", [option for option in OPTIONS if option.off], ids=lambda option: option.name)
def test_yes_and_no_contradict_each_other(flag: Option) -> None:
    yes, no = flag.names[0], flag.off[0]
    with pytest.raises(UsageError, match=f"^{no} and {yes} contradict each other: {LEAVE}$"):
        parse(f"{no} {yes} t.py")
    assert parse(f"{yes} {yes} t.py").value(flag.name) is True  # said twice is no contradiction


def test_tuning_without_its_library_is_refused_by_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "never.py"
    script.write_text("raise SystemExit('a worker was started')")
    monkeypatch.setitem(sys.modules, "bayes_opt", None)
    for words in (["--autotune"], ["--autotune-log", str(tmp_path / "x.csv")]):
        assert main(["run", *words, str(script)]) == 2
        assert f"{words[0]} needs the package bayesian-optimization" in capsys.readouterr().err


def test_options_of_different_places_do_not_contradict_each_other() -> None:
    asked = parse("--standalone t.py", PET_RDZV_ENDPOINT="a:1")
    assert asked.has("--standalone")
    assert not asked.has("--rdzv-endpoint")
    with pytest.raises(UsageError, match="PET_LOG_DIR and PET_OUTPUT_FILENAME contradict each other"):
        parse("t.py", PET_LOG_DIR="a", PET_OUTPUT_FILENAME="b")


def test_torchrun_takes_standalone_with_an_endpoint_that_means_nothing() -> None:
    asked = parse("--standalone --rdzv-endpoint localhost:0 t.py")
    assert idle_options(asked) == [
        "--rdzv-endpoint has no effect: with --standalone one machine runs without a rendezvous"
    ]
    assert idle_options(parse("--rdzv-endpoint localhost:0 t.py")) == []


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"PET_NNODES": "x"},
            "PET_NNODES=x is invalid: expected a whole number above 0, or two of them",
        ),
        (
            {"PET_STANDALONE": "x"},
            "PET_STANDALONE=x is invalid: expected 1 or 0, true or false, yes or no, on or off",
        ),
    ],
)
def test_variables_that_make_no_sense(variables: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse("t.py", **variables)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        ("--fusion-threshold-mb 64 --cache-capacity 0", {"FUSION_BYTES": "67108864", "CACHE_CAPACITY": "0"}),
        ("--hierarchical-allreduce", {"ALLREDUCE_ALGORITHM": "hierarchical"}),
        ("--no-hierarchical-allreduce", {"HIERARCHICAL_BYTES": "2147483648"}),
        ("--no-hierarchical-allgather", {"HIERARCHICAL_ALLGATHER": "0"}),
        ("--autotune-log /x.csv", {"AUTOTUNE": "1", "AUTOTUNE_LOG": "/x.csv"}),
        ("--autotune-log-file /x.csv", {"AUTOTUNE": "1", "AUTOTUNE_LOG": "/x.csv"}),
        ("--autotune --autotune-bayes-opt-max-samples 7", {"AUTOTUNE": "1", "AUTOTUNE_TRIALS": "7"}),
        ("--timeline-filename /t --timeline-mark-cycles", {"TIMELINE": "/t", "TIMELINE_MARK_CYCLES": "1"}),
        ("--no-stall-check", {"STALL_WARNING": "0"}),
        ("--stall-check-warning-time-seconds 5", {"STALL_WARNING": "5"}),
        ("--stall-check-shutdown-time-seconds 9", {"STALL_SHUTDOWN": "9"}),
        ("--log-level TRACE --log-hide-timestamp", {"LOG_LEVEL": "debug", "LOG_HIDE_TIME": "1"}),
        ("--log-with-timestamp", {"LOG_HIDE_TIME": "0"}),
        ("--thread-affinity 0,1", {"THREAD_AFFINITY": "0,1"}),
        ("--start-timeout 9.5", {"START_TIMEOUT": "9.5"}),
        ("--start-timeout 1234567", {"START_TIMEOUT": "1234567"}),
        ("--cycle-time-ms 3.5", {"LINGER": "0.0035"}),
        ("--mpi --num-nccl-streams 2 --no-torus-allreduce", {}),
    ],
)
def test_options_of_the_engine_become_settings(line: str, settings: dict[str, str]) -> None:
    found = worker_settings(parse(f"{line} t.py"), {})
    assert found == {f"RONDE_{name}": text for name, text in settings.items()}
    resolve(found)


def test_the_command_line_goes_before_a_variable_that_disables() -> None:
    settings = worker_settings(parse("--stall-check t.py"), {})
    assert resolve({"HOROVOD_STALL_CHECK_DISABLE": "1"}).stall_warning_ns == 0
    assert resolve({"HOROVOD_STALL_CHECK_DISABLE": "1"} | settings).stall_warning_ns == 10 * SECOND


def test_nccl_goes_the_same_way_as_we() -> None:
    """As horovodrun does for NCCL, which makes its own connections."""
    asked = parse("--network-interface eth0 --tcp t.py")
    ours = {"RONDE_INTERFACE": "eth0", "NCCL_IB_DISABLE": "1"}
    assert worker_settings(asked, {}) == {**ours, "NCCL_SOCKET_IFNAME": "eth0"}
    assert worker_settings(asked, {"NCCL_SOCKET_IFNAME": "ib0"}) == ours  # the user's


def test_every_setting_behind_an_option_exists() -> None:
    for option in ENGINE_OPTIONS:
        if option.variable:
            samples = {
                "FILE": "/f",
                "PATH": "/f",
                "LEVEL": "info",
                "CORES": "0,1",
                "ACTION": "warn",
                "WHAT": "payload",
            }
            words = [option.name, *([samples.get(option.metavar, "2")] if option.metavar else []), "t.py"]
            settings = worker_settings(parse_arguments(words, {}), {})
            assert settings
            resolve(settings)


def test_options_without_effect_are_reported_once() -> None:
    asked = parse("--torus_allreduce --gloo t.py", PET_DISABLE_CACHE="1")
    assert [sentence.split(":")[0] for sentence in idle_options(asked)] == [
        "--torus_allreduce has no effect",
        "--gloo has no effect",
    ]


def test_variables_of_torchruns_agent_are_reported() -> None:
    variables = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "TORCHELASTIC_HEALTH_CHECK_PORT": "8080"}
    timer, port = idle_variables(variables)
    assert timer.startswith("TORCHELASTIC_ENABLE_FILE_TIMER has no effect: there is no watchdog")
    assert port.startswith("TORCHELASTIC_HEALTH_CHECK_PORT has no effect")
    assert idle_variables({"TORCHELASTIC_ENABLE_FILE_TIMER": "0", "TORCHELASTIC_RUN_ID": "x"}) == []


def test_the_table_is_consistent() -> None:
    names = [name for option in OPTIONS for name in option.names + option.off]
    assert len(names) == len(set(names))
    for option in OPTIONS:
        assert all(name.startswith("-") and "_" not in name for name in option.names)
        assert bool(option.kind.right) == bool(option.metavar), option.name
        assert not option.metavar or not option.off


def find(name: str, *, module: bool = False, no_python: bool = False, run_path: bool = False) -> list[str]:
    return find_command(
        name, ["x"], module=module, no_python=no_python, run_path=run_path, search_path="/usr/bin:/bin"
    )


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_name_of_the_program_becomes_a_command(here: Path) -> None:
    (here / "train.py").write_text("#!/usr/bin/env python3\n")
    (here / "tool").write_text("#!/bin/sh\n")
    (here / "tool").chmod(0o755)
    assert find("train.py") == [sys.executable, "train.py", "x"]
    assert find("package.train", module=True) == [sys.executable, "-m", "package.train", "x"]
    assert find("tool") == ["./tool", "x"]
    (here / "train").write_text("print('like torchrun')\n")
    assert find("train") == [sys.executable, "train", "x"]
    (here / "train").write_text("#!/usr/bin/env python3\n")
    assert find("train") == [sys.executable, "train", "x"]
    assert find("./tool") == ["./tool", "x"]
    assert find(str(here / "tool")) == [str(here / "tool"), "x"]
    assert find("sh") in (["/bin/sh", "x"], ["/usr/bin/sh", "x"])
    (here / "train.py").chmod(0o755)
    assert find("train.py", no_python=True) == ["./train.py", "x"]
    assert find("tool", run_path=True) == [sys.executable, "tool", "x"]
    (here / "package").mkdir()
    (here / "package" / "__main__.py").touch()
    (here / "app.pyz").touch()
    assert find("package") == [sys.executable, "package", "x"]
    assert find("./app.pyz") == [sys.executable, "./app.pyz", "x"]


def test_commands_that_cannot_be_run(here: Path) -> None:
    (here / "folder.py").mkdir()
    (here / "plain").write_text("#!/bin/sh\n")
    for name, text in {"lost": "#!/no/shell -e\n", "bare": "echo\n"}.items():
        (here / name).write_text(text)
        (here / name).chmod(0o755)
    for name, message in {
        "nope.py": f"script 'nope.py' not found in {here}",
        "/nowhere/nope.py": "script '/nowhere/nope.py' not found",
        "nope": f"program 'nope' not found in {here} or in PATH",
        "./nope": f"program './nope' not found in {here}",
        "folder.py": "cannot run 'folder.py': it is a directory, not a script",
        "plain": "cannot run 'plain': it is not executable (chmod +x would make it so)",
        "lost": "cannot run 'lost': its first line names '/no/shell', which does not exist",
        "bare": "cannot run 'bare': its first line names no interpreter, as in #!/bin/sh",
        "": f"program '' not found in {here} or in PATH",
    }.items():
        with pytest.raises(UsageError) as caught:
            find(name)
        assert str(caught.value) == message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_script_that_may_not_be_read(here: Path) -> None:
    (here / "secret.py").touch(mode=0o000)
    with pytest.raises(UsageError, match=r"cannot run 'secret.py': it may not be read"):
        find("secret.py")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rnu"], "ronde: unknown command 'rnu'; did you mean run?\n"),
        (["--versoin"], "ronde: unknown command '--versoin'; did you mean --version?\n"),
        (["run", "-n", "0", "x.py"], f"ronde run: -n 0 is invalid: {COUNT}\n"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert capsys.readouterr() == ("", message)


@pytest.mark.parametrize("words", [[], ["-h"], ["--help"], ["help"], ["run", "--help"], ["run", "-h"]])
def test_help_is_printed_without_a_script(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: ronde run")
    assert max(map(len, shown.splitlines())) <= 100


def test_the_short_help_is_a_part_of_the_long_one(capsys: pytest.CaptureFixture[str]) -> None:
    main(["run", "-h"])
    short = capsys.readouterr().out
    main(["run", "--help"])
    long = capsys.readouterr().out
    assert len(short.splitlines()) < 80
    assert {line for line in short.splitlines() if line.startswith("  -")} <= set(long.splitlines())
    for option in OPTIONS:
        assert (f"  {', '.join(option.names + option.off)}" in long) == (not option.refused)


@pytest.mark.parametrize("words", [["--version"], ["run", "--version"], ["run", "-v"]])
def test_the_version_is_printed_without_a_script(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("ronde ")
