"""What `ronde` and `ronde run` make of their arguments, and of mistakes in them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ronde.cli import main
from ronde.cli.run import RunArguments, parse_arguments
from ronde.errors import UsageError
from ronde.launch.command import find_command


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("train.py", RunArguments("train.py")),
        ("-n 4 train.py", RunArguments("train.py", workers=4)),
        ("-n4 train.py", RunArguments("train.py", workers=4)),
        ("-n=4 train.py", RunArguments("train.py", workers=4)),
        ("-np 4 train.py", RunArguments("train.py", workers=4)),
        ("-np=4 train.py", RunArguments("train.py", workers=4)),
        ("--num-proc 4 train.py", RunArguments("train.py", workers=4)),
        ("--nproc-per-node 4 train.py", RunArguments("train.py", workers=4)),
        ("--nproc_per_node=4 train.py", RunArguments("train.py", workers=4)),
        ("-n 2 -n 3 train.py", RunArguments("train.py", workers=3)),
        ("-n auto train.py", RunArguments("train.py", workers=None)),
        ("train.py -n 4 --help", RunArguments("train.py", ("-n", "4", "--help"))),
        ("-n 2 -- train.py --x", RunArguments("train.py", ("--x",), workers=2)),
        ("-n 2 train.py -- x", RunArguments("train.py", ("--", "x"), workers=2)),
        ("-- -odd.py", RunArguments("-odd.py")),
        ("-m package.train -n 4", RunArguments("package.train", ("-n", "4"), module=True)),
        ("-m -n 4 package.train", RunArguments("package.train", workers=4, module=True)),
        ("--no-python ./run.py x", RunArguments("./run.py", ("x",), no_python=True)),
        ("--no_python ./run.py x", RunArguments("./run.py", ("x",), no_python=True)),
        ("--dry-run -n 2 train.py", RunArguments("train.py", workers=2, dry_run=True)),
        ("--horovod -n 2 train.py", RunArguments("train.py", workers=2, horovod=True)),
        ("--launcher mpi -n 2 train.py", RunArguments("train.py", workers=2, launcher="mpi")),
        ("--autotune train.py", RunArguments("train.py", autotune=True)),
        ("--autotune-log x.csv train.py", RunArguments("train.py", autotune=True, autotune_log="x.csv")),
        ("-h", None),
        ("-n 2 --help train.py", None),
    ],
)
def test_arguments(line: str, expected: RunArguments | None) -> None:
    assert parse_arguments(line.split()) == expected


COUNT = "it should be a whole number above 0, or auto"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--launcher slurm train.py", "--launcher slurm makes no sense: it should be local or mpi"),
        ("-n 0 train.py", f"-n 0 makes no sense: {COUNT}"),
        ("-n -3 train.py", f"-n -3 makes no sense: {COUNT}"),
        ("-n x train.py", f"-n x makes no sense: {COUNT}"),
        ("-n 2.0 train.py", f"-n 2.0 makes no sense: {COUNT}"),
        ("-n ²  train.py", f"-n ² makes no sense: {COUNT}"),
        ("-nmu 4 train.py", f"-n mu makes no sense: {COUNT}"),
        ("--nproc_per_node=0 train.py", f"--nproc_per_node 0 makes no sense: {COUNT}"),
        ("-np", "-np needs a value: a whole number above 0, or auto"),
        ("--nmu 4 train.py", "unknown option --nmu; did you mean --num-proc?"),
        ("--dryrun train.py", "unknown option --dryrun; did you mean --dry-run?"),
        ("--nproc 4 train.py", "unknown option --nproc; did you mean --nproc-per-node?"),
        ("--zzz train.py", "unknown option --zzz"),
        ("--dry-run=yes train.py", "--dry-run takes no value, but was given 'yes'"),
        ("", "no script to run was given, as in: ronde run -n 4 train.py"),
        ("-n 2 --", "no script to run was given, as in: ronde run -n 4 train.py"),
        ("-m", "no module to run was given, as in: ronde run -n 4 train.py"),
        (
            "-m --no-python x",
            "--module and --no-python contradict each other: a module can only be run by Python",
        ),
    ],
)
def test_mistakes(line: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_arguments(line.split())
    assert str(caught.value) == message


def find(name: str, *, module: bool = False, no_python: bool = False) -> list[str]:
    return find_command(name, ["x"], module=module, no_python=no_python, search_path="/usr/bin:/bin")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_commands(here: Path) -> None:
    (here / "train.py").touch()
    (here / "tool").touch(mode=0o755)
    assert find("train.py") == [sys.executable, "train.py", "x"]
    assert find("package.train", module=True) == [sys.executable, "-m", "package.train", "x"]
    assert find("tool") == ["./tool", "x"]
    assert find("./tool") == ["././tool", "x"]
    assert find(str(here / "tool")) == [str(here / "tool"), "x"]
    assert find("sh") in (["/bin/sh", "x"], ["/usr/bin/sh", "x"])
    (here / "train.py").chmod(0o755)
    assert find("train.py", no_python=True) == ["./train.py", "x"]


def test_commands_that_cannot_be_run(here: Path) -> None:
    (here / "folder.py").mkdir()
    (here / "plain").touch(mode=0o644)
    for name, message in {
        "nope.py": f"script 'nope.py' not found in {here}",
        "/nowhere/nope.py": "script '/nowhere/nope.py' not found",
        "nope": f"program 'nope' not found in {here} or in PATH",
        "./nope": f"program './nope' not found in {here}",
        "folder.py": "cannot run 'folder.py': it is a directory, not a script",
        "plain": "cannot run 'plain': it is not executable (chmod +x would make it so)",
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
        (["rnu"], "ronde: there is no 'rnu'; did you mean run?\n"),
        (["--versoin"], "ronde: there is no '--versoin'; did you mean --version?\n"),
        (["run", "-n", "0", "x.py"], f"ronde run: -n 0 makes no sense: {COUNT}\n"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert capsys.readouterr() == ("", message)


@pytest.mark.parametrize("words", [[], ["-h"], ["--help"], ["help"], ["run", "--help"], ["run", "-h"]])
def test_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: ronde run")
    assert max(map(len, shown.splitlines())) <= 100


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("ronde ")
