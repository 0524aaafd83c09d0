"""Runs the user's discovery script every second to learn the available hosts.

The script prints one host per line, as `name:slots` or `name`. If it fails or prints anything else, the last hosts
stay valid and the user gets one message; before the first answer, this is an error. A silent script is ended and called
again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping

from ronde.errors import UsageError
from ronde.launch.config import Discovery
from ronde.launch.hosts.host_list import Host, parse_discovered
from ronde.launch.loop import Loop, Order

__all__ = ["HostScript"]

PAUSE_NS = 10**9  # from an answer to the next call
PATIENCE_NS = 60 * 10**9  # how long a call may take
MOST_BYTES = 1 << 20


class HostScript:
    """The script, called by the loop; `offered` gets the hosts whenever they change, `complain` gets problems.

    The loop raises UsageError if the first answer is invalid.
    """

    def __init__(
        self,
        discovery: Discovery,
        environment: Mapping[str, str],
        loop: Loop,
        offered: Callable[[tuple[Host, ...]], None],
        complain: Callable[[str], None],
    ) -> None:
        self._slots = discovery.slots
        self._command, self._name = _command(discovery.script)
        self._environment = environment
        self._loop = loop
        self._offered, self._complain = offered, complain
        self._running: subprocess.Popen[bytes] | None = None
        self._answer = b""
        self._words = os.memfd_create("ronde host discovery", os.MFD_CLOEXEC)  # its standard error
        self._last: tuple[Host, ...] | None = None
        self._complaint = ""

    @property
    def trouble(self) -> str:
        """The present problem of the script; empty if there is none."""
        silent = f"{self._name} has not answered" if self._last is None else ""
        return self._complaint or silent

    def ask_for_hosts(self) -> None:
        """Call the script, now and repeatedly. Raises UsageError if it cannot run."""
        os.ftruncate(self._words, 0)
        os.lseek(self._words, 0, os.SEEK_SET)  # the script shares this offset
        try:
            self._running = self._start()
        except OSError as error:
            raise UsageError(
                f"cannot run the host discovery script {self._name}: {error.strerror}; expected an "
                "executable file, or a command, that prints one host:slots per line"
            ) from None
        assert self._running.stdout is not None
        self._answer = b""
        os.set_blocking(self._running.stdout.fileno(), False)
        self._loop.watch(self._running.stdout.fileno(), Order.NODES, self._read)
        self._loop.set_timer(self, time.monotonic_ns() + PATIENCE_NS, self._too_late)

    def _start(self) -> subprocess.Popen[bytes]:
        def start(command: list[str]) -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=self._words,
                bufsize=0,
                start_new_session=True,
            )

        try:
            return start(self._command)
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                raise
            return start(["/bin/sh", *self._command])  # without a #! line, as a shell does

    def close(self) -> None:
        """Stop calling the script. A second call does nothing."""
        if self._words >= 0:
            self._loop.set_timer(self, None, self._again)
            self._stop()
            os.close(self._words)
            self._words = -1

    def _read(self) -> None:
        assert self._running is not None
        assert self._running.stdout is not None
        try:
            data = os.read(self._running.stdout.fileno(), 64 * 1024)
        except BlockingIOError:
            return
        self._answer += data
        if len(self._answer) > MOST_BYTES:
            self._end(f"printed more than {MOST_BYTES >> 20} MiB, and was ended")
        elif not data:
            self._answered()

    def _answered(self) -> None:
        text = self._answer.decode(errors="replace")
        code = self._stop(kill=False)
        try:
            if code:
                last = (
                    os.pread(self._words, MOST_BYTES, 0).decode(errors="replace").strip().rpartition("\n")[2]
                )
                raise UsageError(f"{self._name} failed with exit code {code}: {last or 'it printed nothing'}")
            hosts = parse_discovered(text, self._slots, self._name)
        except UsageError as error:
            if self._last is None:
                raise
            self._wrong(str(error))
        else:
            self._complaint = ""
            if hosts != self._last:
                self._last = hosts
                self._offered(hosts)
        self._loop.set_timer(self, time.monotonic_ns() + PAUSE_NS, self._again)

    def _too_late(self) -> None:
        self._end(f"gave no answer within {PATIENCE_NS // 10**9} s, and was ended")

    def _end(self, why: str) -> None:
        self._stop()
        self._wrong(f"{self._name} {why}")
        self._loop.set_timer(self, time.monotonic_ns() + PAUSE_NS, self._again)

    def _again(self) -> None:
        try:
            self.ask_for_hosts()
        except UsageError as error:
            self._wrong(str(error))
            self._loop.set_timer(self, time.monotonic_ns() + PAUSE_NS, self._again)

    def _wrong(self, text: str) -> None:
        if text != self._complaint:
            self._complaint = text
            self._complain(text)

    def _stop(self, *, kill: bool = True) -> int:
        """End the script if it still runs; return its exit code."""
        if self._running is None:
            return 0
        assert self._running.stdout is not None
        self._loop.unwatch(self._running.stdout.fileno())
        self._running.stdout.close()
        if kill:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._running.pid, signal.SIGKILL)
        try:
            code = self._running.wait(timeout=1)  # a script that has closed its output is about to end
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._running.pid, signal.SIGKILL)
            code = -signal.SIGKILL
            # A hung mount may hold even a killed process.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._running.wait(timeout=1)
        self._running = None
        return code


def _command(script: str) -> tuple[list[str], str]:
    """Return the words that run the script, a file or a command with arguments, and its name for messages.

    Raises UsageError.
    """
    words = [script]
    if not os.path.exists(script):
        try:
            words = shlex.split(script)
        except ValueError as error:
            raise UsageError(f"cannot run the host discovery script {script}: {error}") from None
    path = os.path.abspath(words[0])
    if not os.path.exists(path):  # a program in PATH, then
        path = shutil.which(words[0]) or path
    return [path, *words[1:]], path if len(words) == 1 else script
