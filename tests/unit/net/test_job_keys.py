"""The key of a job, and files that must not be taken for one."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.other_user import NOBODY, as_nobody

from ronde.errors import UsageError
from ronde.net.job_keys import find_job_key, key_in_memory, read_key_file
from ronde.settings import JobKey

KEY = JobKey.generate()
OF_THIS_MACHINE = f"/tmp/ronde-{os.geteuid()}"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def find(home: Path, job: str = "job", **more: Any) -> JobKey:
    terms: dict[str, Any] = {"key": None, "descriptor": None, "file": "", "is_insecure": False}
    return find_job_key(job, {"HOME": str(home)}, **{**terms, "is_one_machine": False, **more})


def written(path: Path, text: str = KEY.hex() + "\n", mode: int = 0o600) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    path.write_text(text)
    path.chmod(mode)
    return path


def of_user(home: Path) -> Path:
    return home / ".config" / "ronde" / "job.key"


def test_a_given_key_goes_before_a_file_and_that_before_the_users(home: Path, tmp_path: Path) -> None:
    file = written(tmp_path / "given.key")
    other = JobKey.generate()
    assert find(home, key=other, file=str(file), is_insecure=True) == other
    assert find(home, file=str(file), is_insecure=True) == KEY
    assert find(home, is_insecure=True) == JobKey.derived_from("job")
    assert not of_user(home).exists()


def test_a_user_has_one_secret_file_and_each_job_a_key_of_it(home: Path) -> None:
    first, again, other = find(home), find(home), find(home, "other job")
    assert first == again != other
    assert JobKey.derived_from("job") not in (first, other)
    assert stat.S_IMODE(of_user(home).stat().st_mode) == 0o600
    assert [path.name for path in of_user(home).parent.iterdir()] == ["job.key"]
    assert of_user(home).read_text().strip() not in (first.hex(), other.hex())


def test_ranks_that_come_at_once_agree(home: Path) -> None:
    program = (
        "import sys; from ronde.net.job_keys import find_job_key as find; sys.stdin.read();"
        "print(find('job', {'HOME': sys.argv[1]}, key=None, descriptor=None, file='', is_insecure=False,"
        " is_one_machine=False).hex())"
    )
    go, start = os.pipe()
    command = [sys.executable, "-c", program, str(home)]
    ranks = [subprocess.Popen(command, stdin=go, stdout=subprocess.PIPE) for _ in range(6)]
    os.close(go)
    os.close(start)  # all go on now
    keys = {rank.communicate()[0] for rank in ranks}
    assert keys == {find(home).hex().encode() + b"\n"}
    assert [path.name for path in of_user(home).parent.iterdir()] == ["job.key"]


def _wide(path: Path) -> None:
    written(path, mode=0o644)


def _link(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.symlink_to(written(path.parent / "elsewhere"))


def _in_a_shared_directory(path: Path) -> None:
    written(path).parent.chmod(0o777)


def _pipe(path: Path) -> None:
    path.parent.mkdir(parents=True)
    os.mkfifo(path, 0o600)


def _half(path: Path) -> None:
    written(path, KEY.hex()[:-1])


def _of_another_user(path: Path) -> None:
    os.chown(written(path), 65534, -1)


BAD = [
    (_wide, r"mode 0644.*chmod 600 .*job\.key.*if the mode stays.*RONDE_JOB_KEY_FILE"),
    (_link, "is a link, which is not followed"),
    (_in_a_shared_directory, "others may write to"),
    (_pipe, "is not a regular file"),
    (_half, "64 hexadecimal digits"),
    pytest.param(
        _of_another_user, "belongs to user 65534, and this process runs as user 0", marks=pytest.mark.root
    ),
]


@pytest.mark.parametrize("is_one_machine", [True, False])
@pytest.mark.parametrize(("spoil", "says"), BAD)
def test_a_spoilt_file_is_refused_and_nothing_stands_in_for_it(
    spoil: Callable[[Path], None], says: str, is_one_machine: bool, home: Path
) -> None:
    spoil(of_user(home))
    with pytest.raises(UsageError, match=says) as caught:
        find(home, is_one_machine=is_one_machine)
    assert KEY.hex()[:8] not in str(caught.value)
    assert "there is no job key" not in str(caught.value)


@pytest.mark.parametrize("refuses", [True, False])
def test_no_key_is_made_where_modes_do_not_stay(
    refuses: bool, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on vfat, where every file has the mode of the mount, and a change is refused or forgotten."""

    def fchmod(fd: int, mode: int) -> None:
        os.chmod(fd, 0o755)
        if refuses:
            raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "fchmod", fchmod)
    with pytest.raises(UsageError, match=r"without Unix modes \(vfat.*mode 0755.*set RONDE_JOB_KEY_FILE"):
        find(home)
    assert list(of_user(home).parent.iterdir()) == []


def test_a_link_in_place_of_the_directory_is_not_followed(home: Path) -> None:
    elsewhere = written(home / "elsewhere" / "job.key").parent
    of_user(home).parent.parent.mkdir()
    of_user(home).parent.symlink_to(elsewhere)
    with pytest.raises(
        UsageError, match=r"there is no job key.*/\.config/ronde is a link, which is not followed"
    ):
        find(home)


@pytest.mark.parametrize(
    ("spoil", "says"), [bad for bad in BAD if bad[0] not in (_link, _in_a_shared_directory)]
)
def test_a_spoilt_file_that_the_user_names_is_refused(
    spoil: Callable[[Path], None], says: str, home: Path, tmp_path: Path
) -> None:
    spoil(tmp_path / "keys" / "job.key")
    with pytest.raises(UsageError, match=says):
        find(home, file=str(tmp_path / "keys" / "job.key"))


@pytest.mark.root
def test_a_mounted_secret_is_read_by_a_user_who_is_not_root() -> None:
    """Kubernetes links to root's file, which the group of the Pod may read (fsGroup)."""
    with tempfile.TemporaryDirectory() as folder:
        mount = Path(folder)
        file = written(mount / "..data" / "job.key", mode=0o440)
        os.chown(file, 0, NOBODY)
        link = mount / "job.key"
        link.symlink_to("..data/job.key")
        for each in (mount, file.parent):
            each.chmod(0o755)
        assert as_nobody(read_key_file, str(link)) == "done"
        file.chmod(0o444)
        assert "belongs to user 0" in as_nobody(read_key_file, str(link))


def test_without_a_home_directory_only_one_machine_has_a_key(tmp_path: Path) -> None:
    nowhere = tmp_path / "not" / "there"
    with pytest.raises(
        UsageError, match=r"without which strangers could join: .* No such file.*RONDE_JOB_KEY_FILE"
    ):
        find(nowhere)
    was_there = Path(OF_THIS_MACHINE).exists()
    key = find(nowhere, is_one_machine=True)
    assert key == find(nowhere, is_one_machine=True)
    assert key.file.startswith(f"{OF_THIS_MACHINE}/job.key")
    if not was_there:
        shutil.rmtree(OF_THIS_MACHINE)


@pytest.mark.root
def test_nothing_is_left_in_the_home_directory_of_another_user(home: Path) -> None:
    """As under sudo, where HOME may still be the calling user's."""
    os.chown(home, 65534, 65534)
    with pytest.raises(UsageError, match="belongs to user 65534"):
        find(home)
    assert not list(home.iterdir())


def test_a_key_in_memory_is_read_once(home: Path) -> None:
    fd = key_in_memory(KEY)
    with pytest.raises(PermissionError):  # it is every worker's
        os.write(fd, b"0" * 64)
    assert find(home, descriptor=fd) == KEY
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert find(home, descriptor=fd) == KEY
    with pytest.raises(UsageError, match=r"RONDE_JOB_KEY_FD=0 .* without --job-key-by-descriptor"):
        find(home, descriptor=0)
