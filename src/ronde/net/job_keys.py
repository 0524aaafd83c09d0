"""Finds the key of a job. The first of these that exists:

1. the given key: RONDE_JOB_KEY, the descriptor RONDE_JOB_KEY_FD, the file RONDE_JOB_KEY_FILE;
2. with RONDE_INSECURE_JOB_KEY, a key that follows from the job's name: it keeps jobs apart, but not strangers out;
3. a key that follows from the user's key file (`key_files`) and the job's name: so machines that share a home
   directory, or one machine alone, need no setting, and two jobs of a user do not mix;
4. none, and the job does not start: ranks unpickle data of other ranks, so strangers on the network could run programs.
"""

from __future__ import annotations

import fcntl
import functools
import os
from collections.abc import Mapping

from ronde.errors import UsageError
from ronde.job_key import JobKey
from ronde.net.key_files import NoKeyFileError, own_key, read_key_file

__all__ = ["INSECURE", "find_job_key", "key_in_memory"]

INSECURE = (
    "the job's name is its key, so a stranger on this network who guesses the name can join this job and run "
    "programs in it: set RONDE_JOB_KEY_FILE instead (docs/security.md says how)"
)
_MEMORY = "ronde-job-key"  # the name of the memory file
REMEDY = (
    "make one with `(umask 077; head -c 32 /dev/urandom | od -An -vtx1 | tr -d ' \\n' > job.key)`, copy it to all "
    "machines and set RONDE_JOB_KEY_FILE to it, or set RONDE_INSECURE_JOB_KEY=1 if no other user reaches this network"
)


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
