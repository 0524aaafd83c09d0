"""The secret of a job."""

from __future__ import annotations

import hashlib
import os
from hmac import HMAC, compare_digest

from ronde.errors import UsageError

__all__ = ["KEY_BYTES", "JobKey"]

KEY_BYTES = 32


class JobKey:
    """The secret that the processes of one job share. It proves membership and is never shown or sent.

    `file` names, for errors, the file that contains the key, and the machine; comparisons ignore it.
    """

    __slots__ = ("_secret", "file")

    def __init__(self, secret: bytes, file: str = "") -> None:
        if len(secret) != KEY_BYTES:
            raise UsageError(f"a job key has {KEY_BYTES} bytes, not {len(secret)}")
        self._secret = secret
        self.file = file

    @classmethod
    def generate(cls) -> JobKey:
        """Return a new random key."""
        return cls(os.urandom(KEY_BYTES))

    @classmethod
    def from_hex(cls, text: str, file: str = "") -> JobKey:
        """Return the key that `hex()` wrote. Raises UsageError, without repeating the text, if it is not one."""
        if len(text) != 2 * KEY_BYTES or not set(text) <= set("0123456789abcdefABCDEF"):
            raise UsageError(
                f"a job key has {2 * KEY_BYTES} hexadecimal digits; this text of {len(text)} characters is not one"
            )
        return cls(bytes.fromhex(text), file)

    @classmethod
    def derived_from(cls, job: str) -> JobKey:
        """Return a key that depends on the job's name alone. It prevents mix-ups, not attacks."""
        return cls(hashlib.sha256(b"ronde: key of the job named " + job.encode()).digest())

    def of_job(self, job: str) -> JobKey:
        """Return the key of one of several jobs that share this key. It reveals nothing about the other jobs' keys."""
        return JobKey(self.hmac(b"key of the job", job.encode()), self.file)

    def refusal(self) -> str:
        """Return the error about another process that does not know this key."""
        sentence = "the other end does not know the job key (RONDE_JOB_KEY) of this job"
        if self.file:
            sentence += (
                f", which comes from {self.file}: it belongs to another job, or to a machine with another such file; "
                "then copy the file there, or give all machines the same RONDE_JOB_KEY_FILE"
            )
        return sentence

    def hex(self) -> str:
        """Return the key as 64 hexadecimal digits, for the environment of a worker or a Secret, and nothing else."""
        return self._secret.hex()

    def hmac(self, *parts: bytes) -> bytes:
        """Return the 32-byte HMAC-SHA256 of the parts, each preceded by its length, so that no two lists collide."""
        return self.begin_hmac(*parts).digest()

    def begin_hmac(self, *parts: bytes) -> HMAC:
        """Return the HMAC of these parts as an object, to be updated with more bytes, whose number the parts tell."""
        mac = HMAC(self._secret, digestmod="sha256")
        for part in parts:
            mac.update(len(part).to_bytes(8, "big") + part)
        return mac

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JobKey) and compare_digest(self._secret, other._secret)

    def __hash__(self) -> int:
        return hash(self._secret)

    def __repr__(self) -> str:
        return "JobKey(secret)"
