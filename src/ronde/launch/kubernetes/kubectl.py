"""Submits a job to Kubernetes by kubectl, shows the output of its Pods, and ends with it.

The job does not need this process: after any signal but Ctrl-C, which deletes the job, it goes on. Other objects than
the one that makes the Pods belong to that one, so that Kubernetes deletes them with it.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

from ronde.errors import UsageError
from ronde.launch.kubernetes.indexed_job import CONTAINER, FollowLogs, JobEnded, JobProgress, Tell
from ronde.launch.kubernetes.manifest import Manifest, PodJob, selector

__all__ = ["submit_and_follow"]

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0  # between questions to Kubernetes
LAST_LINES_S = 30.0  # for output that is still under way when the job has ended
ANSWER_S = 30  # for the API server
INTERRUPTED = 130
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\S+")


def submit_and_follow(manifest: Manifest, job: PodJob, *, detach: bool) -> int:
    """Submit the job; return its exit code when it has ended, or 0 at once with `detach`.

    `manifest`: the objects, first the one that makes the Pods. Raises UsageError if kubectl is missing or refuses.
    """
    kubectl = _Kubectl(job.namespace)
    _submit(kubectl, manifest)
    maker = f"{job.kind.lower()}/{job.name}"
    namespace = f" -n {job.namespace}" if job.namespace else ""
    how = f"end it by: kubectl{namespace} delete {maker}"
    if detach:
        _say(f"submitted {maker}; watch it by: kubectl{namespace} logs -f -l {selector(job.name)}")
        _say(how)
        return 0
    _say(f"submitted {maker}; Ctrl-C deletes it")
    _catch_signals()
    follower = _Follower(kubectl, job)
    try:
        return follower.follow()
    except _SignalError as ended:
        _say(f"{ended}; the job goes on; {how}")
        return 128 + ended.signum
    except KeyboardInterrupt:
        _say(f"deleting {maker}; its Pods have {job.grace_s} s to end (Ctrl-C again: do not wait for them)")
        return follower.delete(maker)
    finally:
        follower.close()


class _SignalError(Exception):
    """A signal ends this process, and not the job."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"got {signal.Signals(signum).name}")
        self.signum = signum


def _catch_signals() -> None:
    def leave(signum: int, _: object) -> None:
        raise _SignalError(signum)

    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # as under nohup
            signal.signal(signum, leave)


def _submit(kubectl: _Kubectl, manifest: Manifest) -> None:
    """Create the objects; the others than the first one belong to it."""
    made = json.loads(kubectl.ask("create", "-o", "json", "-f", "-", data=manifest[:1]))
    owner = {
        **{name: made[name] for name in ("apiVersion", "kind")},
        **{name: made["metadata"][name] for name in ("name", "uid")},
    }
    rest = [{**each, "metadata": {**each["metadata"], "ownerReferences": [owner]}} for each in manifest[1:]]
    try:
        kubectl.ask("create", "-f", "-", data=rest)
    except (UsageError, KeyboardInterrupt):
        kubectl.ask("delete", owner["kind"].lower(), owner["name"], "--wait=false")
        raise


class _Kubectl:
    """Calls of kubectl in a namespace; empty: the one of its context."""

    def __init__(self, namespace: str) -> None:
        path = shutil.which("kubectl")
        if path is None:
            raise UsageError(
                "there is no kubectl in PATH, by which the job would be submitted: install it, or write the manifest "
                "with --manifest FILE and submit it elsewhere"
            )
        self._command = [path, *(["--namespace", namespace] if namespace else [])]

    def ask(self, *words: str, data: Manifest | None = None) -> str:
        """Return the output of a call that reads these objects. Raises UsageError with what kubectl says."""
        done = subprocess.run(
            [*self._command, f"--request-timeout={ANSWER_S}s", *words],
            input="".join(f"{json.dumps(each)}\n" for each in data or ()),
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,  # Ctrl-C is for this process
        )
        if done.returncode:
            said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
            raise UsageError(f"kubectl {words[0]} failed: {said}")
        return done.stdout

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Return a call whose output and errors are pipes."""
        return subprocess.Popen(
            [*self._command, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )


class _Follower:
    """Shows what the Pods of a submitted job print, and waits for the job's end."""

    def __init__(self, kubectl: _Kubectl, job: PodJob) -> None:
        self._kubectl = kubectl
        self._job = job
        self._progress = JobProgress(job.kind, job.name)
        self._logs: list[_PodLog] = []
        self._trouble = ""

    def follow(self) -> int:
        """Return the exit code of the job when it has ended."""
        pause_s = FIRST_PAUSE_S
        while (end := self._look()) is None:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        self._finish_logs(LAST_LINES_S)
        if end.exit_code:
            _say(f"the job has failed: {end.reason}")
        return end.exit_code

    def delete(self, maker: str) -> int:
        """Delete the job, show what its Pods still print, and return the exit code of an interrupted job."""
        try:
            self._kubectl.ask("delete", maker, "--cascade=foreground", "--wait=false")
            self._finish_logs(self._job.grace_s)
        except KeyboardInterrupt:
            pass
        except UsageError as error:
            _say(str(error))
        return INTERRUPTED

    def _finish_logs(self, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        for log in self._logs:
            log.finish(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """End all calls of kubectl."""
        for log in self._logs:
            log.close()

    def _look(self) -> JobEnded | None:
        """Ask once how the job is; follow Pods that are new. Return its end."""
        kinds = f"{self._job.kind.lower()},pods"
        try:
            answer = self._kubectl.ask("get", kinds, "-l", selector(self._job.name), "-o", "json")
        except UsageError as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                _say(f"{error}; asking again until it answers (the job goes on)")
            return None
        self._trouble = ""
        for step in self._progress.read(time.monotonic_ns(), json.loads(answer)["items"]):
            match step:
                case FollowLogs(pod):
                    self._logs.append(_PodLog(self._kubectl, pod))
                case Tell(text):
                    _say(text)
                case JobEnded():
                    return step
        for log in self._logs:
            if log.is_over and log.pod in self._progress.running:
                log.resume()
        return None


class _PodLog:
    """Prints the lines of a Pod, whose agent has put the rank before each."""

    def __init__(self, kubectl: _Kubectl, pod: str) -> None:
        self.pod = pod
        self._kubectl = kubectl
        self._last = ""  # the time of the last line
        self._trouble = ""
        self.resume()

    @property
    def is_over(self) -> bool:
        """Whether kubectl has ended: with the Pod, or because its connection has broken."""
        return not self._printer.is_alive()

    def resume(self) -> None:
        """Follow the Pod, after the last line that was printed."""
        since = [f"--since-time={self._last}"] if self._last else []
        words = ("logs", "--follow", "--timestamps", *since, "--container", CONTAINER, self.pod)
        self._call = self._kubectl.start(*words)
        self._printer = threading.Thread(target=self._print, name=f"output of {self.pod}", daemon=True)
        self._printer.start()

    def _print(self) -> None:
        call, shown = self._call, self._last
        assert call.stdout is not None
        assert call.stderr is not None
        with call.stdout as lines, call.stderr as errors:
            for line in lines:
                when, _, text = line.partition(" ")
                if not _TIME.fullmatch(when):  # what kubelet says in place of the output
                    _write(line)
                elif when > shown:  # --since-time counts whole seconds
                    self._last = when
                    _write(text)
            said = " ".join(errors.read().split())
        if call.wait() > 0 and said != self._trouble:
            self._trouble = said
            _say(f"cannot follow the output of {self.pod}: {said}")

    def finish(self, within_s: float) -> None:
        """Wait for the last line."""
        self._printer.join(within_s)

    def close(self) -> None:
        """End kubectl."""
        self._call.terminate()
        self._call.wait()
        self._printer.join(1.0)


def _write(line: str) -> None:
    """Print a whole line, so that those of several Pods do not mix."""
    try:
        sys.stdout.write(line)
        sys.stdout.flush()
    except (OSError, ValueError):  # the reader is gone
        pass


def _say(text: str) -> None:
    print(f"ronde: {text}", file=sys.stderr, flush=True)
