"""Finds the key of a job. The first of these that exists:

1. the given key: RONDE_JOB_KEY, the descriptor RONDE_JOB_KEY_FD, the file RONDE_JOB_KEY_FILE;
2. with RONDE_INSECURE_JOB_KEY, a key that follows from the job's name: it keeps jobs apart, but not strangers out;
3. a key that follows from the user's key file and the job's name: so machines that share a home directory, or one
   machine alone, need no setting, and two jobs of a user do not mix;
4. none, and the job does not start: ranks unpickle data of other ranks, so strangers on the network could run programs.

The user's key file is in the configuration directory of the home directory, so machines that share the home directory
share it. The first process that needs the file creates it with a random key. It writes a draft, then gives the draft
the name by a hard link, which fails if the file exists: so processes that start at once, on one machine or several,
agree on one key, and none reads half of it. A symbolic link in its place is not followed. A file or directory that
others may read or write is refused, with the command that mends it, because its key may be known. Root may let a group
read its file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import pwd
import stat
from collections.abc import Mapping

from ronde.errors import UsageError
from ronde.job_key import JobKey
from ronde.net.host import host_name
from ronde.trusted_files import describe_foreign_owner, describe_other_writers

__all__ = [
    "INSECURE",
    "KEY_FILE",
    "NoKeyFileError",
    "find_job_key",
    "key_in_memory",
    "own_key",
    "read_key_file",
]

INSECURE = (
    "the job's name is its key, so a stranger on this network who guesses the name can join this job and run "
    "programs in it: set RONDE_JOB_KEY_FILE instead (docs/security.md says how)"
)
KEY_FILE = "job.key"
MOST_BYTES = 4096
ATTEMPTS = 3
OTHERS_READ = 0o077
ROOT_MAY_ALLOW = 0o640  # Kubernetes lets the group of a Pod (fsGroup) read a mounted Secret, which is root's
_WITHOUT_MODES = "a file system without Unix modes (vfat, some network mounts)"
_IF_THE_MODE_STAYS = (
    f"if the mode stays, that is {_WITHOUT_MODES}: set RONDE_JOB_KEY_FILE to a file on another one"
)
# Where the processes of one machine find a key if there is no home directory.
_ON_THIS_MACHINE = ("/tmp", "/dev/shm")
_MEMORY = "ronde-job-key"  # the name of the memory file
REMEDY = (
    "make one with `(umask 077; head -c 32 /dev/urandom | od -An -vtx1 | tr -d ' \\n' > job.key)`, copy it to all "
    "machines and set RONDE_JOB_KEY_FILE to it, or set RONDE_INSECURE_JOB_KEY=1 if no other user reaches this network"
)


class NoKeyFileError(UsageError):
    """This user has no key file, and there is no place for one; the text says why."""


class _NoPlaceError(Exception):
    """There can be no key file in this directory; the text says why."""


def find_job_key(
    job: str,
    environment: Mapping[str, str],
    *,
    key: JobKey | None,
    descriptor: int | None,
    file: str,
    is_insecure: bool,
    is_one_machine: bool,
) -> JobKey:
    """Return the key of the job with this name, by the rules above.

    `is_one_machine`: all ranks and nodes are on this machine. Raises UsageError if there is no key, or an invalid one.
    """
    if key is not None:
        return key
    if descriptor is not None:
        return _read_memory(descriptor)
    if file:
        return read_key_file(file)
    if is_insecure:
        return JobKey.derived_from(job)
    try:
        return own_key(environment, is_one_machine).of_job(job)
    except NoKeyFileError as error:
        raise UsageError(
            f"there is no job key, without which strangers could join: {error}; {REMEDY}"
        ) from None


def key_in_memory(key: JobKey) -> int:
    """Return the descriptor of a sealed memory file with the key, for workers to inherit."""
    fd = os.memfd_create(_MEMORY, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, key.hex().encode())
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@functools.cache  # once in this process, which closes the file; forked children inherit the answer
def _read_memory(fd: int) -> JobKey:
    """Return the key in the launcher's memory file, and close the file, so that child programs do not inherit it."""
    try:
        name = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        name = "closed"
    if not name.startswith(f"/memfd:{_MEMORY}"):
        raise UsageError(
            f"RONDE_JOB_KEY_FD={fd} should be a descriptor with the job key, and is {name}: a program between "
            "`ronde run` and this one has closed it, so start the job without --job-key-by-descriptor"
        )
    key = JobKey.from_hex(os.pread(fd, 4096, 0).decode("ascii", "replace"))
    os.close(fd)
    return key


# Key files


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
            f"do not trust it; {_IF_THE_MODE_STAYS}"
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
            f"new one if others use this machine; {_IF_THE_MODE_STAYS}"
        )
