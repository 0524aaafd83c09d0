"""`ronde completion`: real shells complete command lines by the scripts that it prints."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from ronde.cli import VERBS, main
from ronde.cli.completion import SHELLS, bash_script, fish_script, verbs, zsh_script
from ronde.cli.run_arguments import OPTIONS

HANGING_S = 60

# Command lines up to the cursor, and what some shell must offer for the last word; None: names of files.
LINES: list[tuple[list[str], set[str] | None]] = [
    (["ronde", ""], set(VERBS)),
    (["ronde", "do"], {"doctor"}),
    (["ronde", "run", "--laun"], {"--launcher"}),
    (["ronde", "run", "--launcher", ""], {"local", "mpi"}),
    (["ronde", "run", "-n", "2", "--launcher", "m"], {"mpi"}),
    (["ronde", "run", "--blacklist-cooldown-range", "1", "2", "--rdzv-ba"], {"--rdzv-backend"}),
    (["ronde", "run", "-n", "2", "tr"], None),
    (["ronde", "run", "-n", "2", "train.py", "--laun"], None),
    (["ronde", "bench", "--js"], {"--json"}),
    (["ronde", "bench", "--rdzv-ba"], {"--rdzv-backend"}),
    (["ronde", "trace", "m"], {"merge"}),
    (["ronde", "trace", "merge", "tr"], None),
    (["ronde", "trace", "merge", "--out"], {"--output"}),
    (["ronde", "completion", ""], set(SHELLS)),
]
SCRIPTS = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}


@pytest.fixture
def script(request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The script of the shell that the test's parameter names; a folder beside it has one file."""
    shell = request.param
    if not shutil.which(shell):
        pytest.skip(f"needs {shell}")
    assert main(["completion", shell]) == 0
    path = tmp_path / f"ronde.{shell}"
    path.write_text(capsys.readouterr().out)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.py").touch()
    return path


def said(command: list[str], folder: Path) -> str:
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=True, timeout=HANGING_S
    ).stdout


@pytest.mark.parametrize("script", ["bash"], indirect=True)
def test_bash(script: Path) -> None:
    for words, expected in LINES:
        line = f'source {script}; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _ronde; printf "%s\\n" "${{COMPREPLY[@]}}"'
        found = set(said(["bash", "--norc", "-c", line, "bash", *words], script.parent).split())
        if words[-1] == "" and len(words) == 2:
            expected = {*VERBS, "--help", "--version"}
        assert found == (expected or set()), words  # without a word bash completes names of files


@pytest.mark.parametrize("script", ["bash"], indirect=True)
@pytest.mark.parametrize("words", [["--launcher", "=", "m"], ["--launcher", "=m", "--launcher", "=", "m"]])
def test_bash_separates_the_value_behind_an_equals_sign(script: Path, words: list[str]) -> None:
    line = f'source {script}; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _ronde; echo "${{COMPREPLY[@]}}"'
    assert said(["bash", "--norc", "-c", line, "bash", "ronde", "run", *words], script.parent) == "mpi\n"


@pytest.mark.parametrize("script", ["fish"], indirect=True)
def test_fish(script: Path) -> None:
    for words, expected in LINES:
        line = f"source {script}; complete -C '{' '.join(words)}'"
        shown = said(["fish", "--no-config", "-c", line], script.parent / "folder")
        found = {each.partition("\t")[0] for each in shown.splitlines()}
        assert found == ({"train.py"} if expected is None and words[-1] == "tr" else expected or set()), words


@pytest.mark.parametrize("script", ["zsh"], indirect=True)
def test_zsh(script: Path) -> None:
    """Type each line and a tab; the shell completes it if there is one word."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(script.parent / "folder")
        os.execvp("zsh", ["zsh", "-f", "-i"])
    try:
        begin = f"PS1='> '; autoload -U compinit; compinit -u -D; source {script}; echo re''ady\n"
        assert "ready" in typed(terminal, begin, "ready\r\n")
        for words, expected in LINES:
            one = "train.py" if expected is None and words[-1] == "tr" else min(expected or {""})
            if one and len(expected or {one}) == 1:
                line = " ".join([*words[:-1], one])
                assert line in typed(terminal, " ".join(words) + "\t", line), words
                typed(terminal, "\x15", "")  # clears the line
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


def typed(terminal: int, keys: str, awaited: str) -> str:
    """Return what the terminal shows after these keys, until it shows the awaited text."""
    os.write(terminal, keys.encode())
    shown, ends = "", time.monotonic() + HANGING_S
    while awaited not in shown and time.monotonic() < ends:
        if select.select([terminal], [], [], 1.0)[0]:
            shown += os.read(terminal, 1 << 16).decode(errors="replace")
    return shown


def test_every_option_that_has_an_effect_is_offered() -> None:
    scripts = {shell: make(verbs()) for shell, make in SCRIPTS.items()}
    for option in OPTIONS:
        is_offered = not (option.refused or option.idle)
        for name in option.names + option.off:
            assert (f" {name} " in scripts["bash"] or f' {name}"' in scripts["bash"]) == is_offered, name
            if is_offered:
                assert name in scripts["zsh"], name
                assert f" {name.lstrip('-')} " in scripts["fish"], name


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bahs"], "'bahs' is invalid: expected one of bash, zsh and fish; did you mean bash?"),
        (["bash", "zsh"], "'bash zsh' is invalid"),
        (["--shell", "bash"], "unknown option --shell"),
    ],
)
def test_other_shells_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_the_help_says_where_the_script_belongs(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", *words]) == 0
    assert "source <(ronde completion bash)" in capsys.readouterr().out
