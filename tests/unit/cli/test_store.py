"""Invalid options of `ronde store`; tests/ranks/launcher/test_store_command.py has the valid ones."""

from __future__ import annotations

from contextlib import closing

import pytest

from ronde.cli import main
from ronde.settings import JobKey
from ronde.stores.server import StoreServer


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("", "--port is missing"),
        ("--port 70000", "--port 70000 is invalid: expected a port from 1 to 65535, or 0 for a free one"),
        ("--port 0 more", "unexpected argument 'more': ronde store takes only options"),
        ("--port 0 --jurnal x", "did you mean --journal?"),
        ("--port 0 --journal /absent/x", "cannot open the journal /absent/x: No such file"),
        ("--port 0 --journal /absent/x --seed /absent", "cannot read the journal /absent: No such file"),
        ("--port 0 --seed /etc/passwd", "/etc/passwd is not a journal of a store"),
        ("--port 0 --job-key-file /absent", "cannot read the job key from /absent: No such file"),
        ("--port 0 --job-key-file /etc/passwd", "others may read the job key /etc/passwd (mode 0644)"),
        ("--port 0 --host no-such-host.invalid", "cannot serve at tcp:no-such-host.invalid:0: "),
        ("--port 0 --host 192.0.2.1", "cannot serve at tcp:192.0.2.1:0: Cannot assign requested address"),
        ("--port TAKEN --host 127.0.0.1", "Address already in use; end the process that uses it"),
    ],
)
def test_mistakes_are_one_sentence(
    words: str, complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = JobKey.generate()
    monkeypatch.setenv("RONDE_JOB_KEY", key.hex())
    with closing(StoreServer("tcp:127.0.0.1:0", key)) as other:
        assert main(["store", *words.replace("TAKEN", other.address.rpartition(":")[2]).split()]) == 2
    said = capsys.readouterr().err
    assert said.startswith("ronde store: ")
    assert complaint in said
    assert said.count("\n") == 1


def test_without_a_key_it_says_where_to_put_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RONDE_JOB_KEY", raising=False)
    assert main(["store", "--port", "0"]) == 2
    assert "no job key: set RONDE_JOB_KEY" in capsys.readouterr().err


def test_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "--help"]) == 0
    assert "--journal FILE" in capsys.readouterr().out
