"""Files with a job key: the file that the user names, or the user's default file.

The default file is in the configuration directory of the home directory, so machines that share the home directory
share it. The first process that needs the file creates it with a random key. It writes a draft, then gives the draft
the name by a hard link, which fails if the file exists: so processes that start at once, on one machine or several,
agree on one key, and none reads half of it. A symbolic link in its place is not followed. A file or directory that
others may read or write is refused, with the command that mends it, because its key may be known. Root may let a group
read its file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Mapping

from ronde.errors import UsageError
from ronde.file_owners import describe_foreign_owner, describe_other_writers
from ronde.job_key import JobKey
from ronde.net.host import host_name

__all__ = ["KEY_FILE", "NoKeyFileError", "own_key", "read_key_file"]

KEY_FILE = "job.key"
MOST_BYTES = 4096
ATTEMPTS = 3
OTHERS_READ = 0o077
ROOT_MAY_ALLOW = 0o640  # Kubernetes lets the group of a Pod (fsGroup) read a mounted Secret, which is root's
_WITHOUT_MODES = "a file system without Unix modes (vfat, some network mounts)"
_ELSEWHERE = f"if the mode stays, that is {_WITHOUT_MODES}: set RONDE_JOB_KEY_FILE to a file on another one"
# Where the processes of one machine find a key if there is no home directory.
_ON_THIS_MACHINE = ("/tmp", "/dev/shm")


class NoKeyFileError(UsageError):
    """This user has no key file, and there is no place for one; the text says why."""


class _NoPlaceError(Exception):
    """There can be no key file in this directory; the text says why."""


def read_key_file(path: str) -> JobKey:
    """Return the key in a file that the user has named. Raises UsageError, which does not show the content."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise UsageError(f"cannot read the job key from {path}: {error.strerror}") from None
    return _read(fd, path)


def own_key(environment: Mapping[str, str], is_one_machine: bool) -> JobKey:
    """Return the key in this user's default file, which is created if it does not exist.

    `is_one_machine`: the job is on this machine alone, so that a file of this machine suffices. Raises NoKeyFileError,
    or UsageError that says what is wrong with the file.
    """
    reasons = []
    directories = [_configuration(environment)]
    if is_one_machine:
        directories += [f"{place}/ronde-{os.geteuid()}" for place in _ON_THIS_MACHINE]
    for directory in directories:
        try:
            return _own_key_in(directory)
        except _NoPlaceError as error:
            reasons.append(str(error))
    raise NoKeyFileError("; ".join(reasons))


def _configuration(environment: Mapping[str, str]) -> str:
    given = environment.get("XDG_CONFIG_HOME", "")
    base = given if os.path.isabs(given) else os.path.join(environment.get("HOME") or _home(), ".config")
    return os.path.join(base, "ronde")


def _home() -> str:
    import pwd  # only for processes without HOME

    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        return "/"


def _own_key_in(directory: str) -> JobKey:
    path = os.path.join(directory, KEY_FILE)
    try:
        place = _open_directory(directory)
    except OSError as error:
        raise _NoPlaceError(f"there is no key file {path}: {error.strerror}") from None
    try:
        _check_directory(place, directory)
        for _ in range(ATTEMPTS):  # a file server may say for a moment that there is none
            with contextlib.suppress(FileNotFoundError):
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
                return _read(os.open(KEY_FILE, flags, dir_fd=place), path)
            _create(place, directory)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UsageError(
                f"the key file {path} is a link, which is not followed: put a file there"
            ) from None
        raise _NoPlaceError(f"the key file {path} cannot be used: {error.strerror}") from None
    finally:
        os.close(place)
    raise _NoPlaceError(f"the key file {path} disappears as soon as it is created")


def _open_directory(directory: str) -> int:
    """Return a descriptor of the directory; create it if its parent is this user's, or sticky like /tmp."""
    if os.path.islink(directory):
        raise _NoPlaceError(f"{directory} is a link, which is not followed")
    if not os.path.isdir(directory):
        parent = os.path.dirname(directory)
        base = parent if os.path.isdir(parent) else os.path.dirname(parent)
        status = os.stat(base)
        foreign = describe_foreign_owner(status, base)
        if foreign and not status.st_mode & stat.S_ISVTX:
            raise _NoPlaceError(foreign)
        for folder in (parent, directory):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _check_directory(place: int, directory: str) -> None:
    status = os.fstat(place)
    if foreign := describe_foreign_owner(status, directory):
        raise _NoPlaceError(foreign)
    if writers := describe_other_writers(status, directory):
        raise UsageError(
            f"{writers}, so the job key in it may be theirs: chmod 700 {directory}, and remove {KEY_FILE} there if you "
            f"do not trust it; {_ELSEWHERE}"
        )


def _create(place: int, directory: str) -> None:
    draft = f".{KEY_FILE}.{host_name()}.{os.getpid()}.{os.urandom(4).hex()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(draft, flags, 0o600, dir_fd=place)
    try:
        with os.fdopen(fd, "w") as file:
            _make_private(fd, directory)
            file.write(JobKey.generate().hex() + "\n")
            file.flush()
            os.fsync(fd)
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.link(draft, KEY_FILE, src_dir_fd=place, dst_dir_fd=place, follow_symlinks=False)
    finally:
        os.unlink(draft, dir_fd=place)


def _make_private(fd: int, directory: str) -> None:
    """Take all rights to the empty file from other users. Raises _NoPlaceError if they keep one."""
    with contextlib.suppress(PermissionError):  # from vfat
        os.fchmod(fd, 0o600)
    mode = stat.S_IMODE(os.fstat(fd).st_mode)
    if mode & OTHERS_READ:
        raise _NoPlaceError(
            f"{directory} lies on {_WITHOUT_MODES}, where others may read a key (mode {mode:04o})"
        )


def _read(fd: int, path: str) -> JobKey:
    try:
        _check_file(os.fstat(fd), path)
        text = os.read(fd, MOST_BYTES)
    except OSError as error:
        raise UsageError(f"cannot read the job key from {path}: {error.strerror}") from None
    finally:
        os.close(fd)
    try:
        return JobKey.from_hex(text.decode("ascii", "replace").strip(), f"{path} on {host_name()}")
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _check_file(status: os.stat_result, path: str) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"the job key {path} is not a regular file: name a file that only you can read")
    if status.st_uid == 0 and not mode & ~ROOT_MAY_ALLOW:
        return
    if foreign := describe_foreign_owner(status, f"the job key {path}"):
        raise UsageError(f"{foreign}: copy it into a file that belongs to this user (install -m 600)")
    if mode & OTHERS_READ:
        raise UsageError(
            f"others may read the job key {path} (mode {mode:04o}), so it may be known: chmod 600 {path}, and make a "
            f"new one if others use this machine; {_ELSEWHERE}"
        )
