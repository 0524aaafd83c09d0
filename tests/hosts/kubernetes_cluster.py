"""A simulated Kubernetes: a program `kubectl`, and a Job controller that starts processes instead of Pods.

No part of Kubernetes runs here. What is real is the contract: a Pod is a process with exactly the container's command
and variables, as the first process of namespaces of its own (network, host name, processes, mounts), with the Secret
mounted as Kubernetes mounts it, /dev/shm of its own, and the names of the other Pods once these have addresses. The
controller knows the fields of a Job, and of a JobSet of one, that Ronde writes, and refuses others.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from ronde.testing.hosts import Hosts

MARK = "TEST_RUN_OF_RONDE"
TURN_S = 0.02
PATIENCE_S = 120.0  # against hanging only
TERMINATION_GRACE_S = 10.0  # Kubernetes waits 30 s from SIGTERM to SIGKILL
DOMAIN = "svc.cluster.local"
SUFFIX = "x7k2p"  # Kubernetes chooses five letters

# Becomes the first process of a container: $1 is its host name, $2 its /etc/hosts, $3 the mounted Secret and $4 where.
START = """
set -e
mount --make-rprivate /
mount -t proc proc /proc
mount --bind "$2" /etc/hosts
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir -p "$4"
mount --bind "$3" "$4"
hostname "$1"
shift 4
exec "$@"
"""

KUBECTL = """#!{python}
import json, os, sys, time
from pathlib import Path

place, words = Path({place!r}), sys.argv[1:]
while words[0].startswith("--"):
    del words[: 2 if words[0] == "--namespace" else 1]
with (place / "calls").open("a") as calls:
    calls.write(" ".join(words) + "\\n")

def write(name, value):
    (place / f"{{name}}.new").write_text(json.dumps(value))
    (place / f"{{name}}.new").rename(place / name)

if words[0] == "create":
    objects = [json.loads(line) for line in sys.stdin]  # kubectl reads one after the other
    if (place / "refusal").exists():
        sys.exit("Error from server (Forbidden): " + (place / "refusal").read_text())
    for each in objects:
        each["metadata"]["uid"] = f"uid-of-{{each['kind']}}"
        write(each["kind"] + ".json", each)
        print(json.dumps(each))
elif words[0] == "get":
    state = place / "state"
    print(state.read_text() if state.exists() else json.dumps({{"items": []}}))
elif words[0] == "logs":
    log, done = place / f"{{words[-1]}}.log", place / f"{{words[-1]}}.done"
    with log.open() as file:
        while True:
            is_done = done.exists()
            if text := file.read():
                print(text, end="", flush=True)
            elif is_done:
                break
            else:
                time.sleep(0.02)
elif words[0] == "delete":
    write("deletion", words[1])
"""


class Pod:
    """A process that stands for a Pod."""

    def __init__(self, cluster: KubernetesCluster, index: int, number: int) -> None:
        self.index, self.number = index, number
        job, self._subdomain, spec = cluster.job()
        self.host_name = f"{job}-{index}"
        self.name = f"{self.host_name}-{SUFFIX}{number}"
        self.is_evicted = False
        self.ended: str | None = None  # when
        self._killed_at: float | None = None  # when a Pod that was asked to end is killed
        self._template = spec["template"]["spec"]
        self.hosts_file = cluster.place / f"{self.name}.hosts"
        self.hosts_file.touch()
        self._log = cluster.place / f"{self.name}.log"
        self._log.touch()
        self._start(cluster)
        threading.Thread(target=self._copy_output, daemon=True).start()

    @property
    def full_name(self) -> str:
        """The name that the headless Service gives it."""
        return f"{self.host_name}.{self._subdomain}.lab.{DOMAIN}"

    def _start(self, cluster: KubernetesCluster) -> None:
        (container,) = self._template["containers"]
        key = next(each for each in container["volumeMounts"] if each["name"] == "job-key")
        variables = {"JOB_COMPLETION_INDEX": str(self.index), "HOSTNAME": self.host_name}
        for each in container["env"]:
            source = each.get("valueFrom", {}).get("secretKeyRef")
            given = cluster.object("Secret")["stringData"][source["key"]] if source else each["value"]
            variables[each["name"]] = given if source else expand(given, variables)
        command = [expand(word, variables) for word in container["command"]]
        separate = ("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child")
        outside = (str(self.hosts_file), str(cluster.mounted_secret(self)), key["mountPath"])
        self.process = subprocess.Popen(
            [*cluster.hosts.command(self.number), *separate, "sh", "-c", START, "sh", self.host_name]
            + [*outside, *command],
            env={"PATH": cluster.path, MARK: os.environ[MARK], **variables},
            cwd=cluster.image,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _copy_output(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines, self._log.open("a") as log:
            for line in lines:
                log.write(f"{now()} {line}")
                log.flush()
        self._log.with_suffix(".done").touch()

    def first_process(self) -> int:
        """Return the id of its process 1, as this machine counts. Raises ProcessLookupError if it has ended."""
        own = self.process.pid
        children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
        if not children:
            raise ProcessLookupError(self.name)
        return int(children[0])

    def stop(self) -> None:
        """Ask it to end, as Kubernetes does when it deletes a Pod; call it until the Pod has ended.

        The first process of a container ignores SIGTERM until it handles it.
        """
        if self.process.poll() is not None:
            return
        if self._killed_at is None:
            self._killed_at = time.monotonic() + TERMINATION_GRACE_S
            self.ended = now()
            with contextlib.suppress(OSError):  # it has just ended
                os.kill(self.first_process(), signal.SIGTERM)
        elif time.monotonic() >= self._killed_at:
            self.kill()

    def kill(self) -> None:
        """Kill all its processes.

        `unshare` dies with its child only once it has asked for that, so it is stopped first and its child killed.
        """
        if self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGSTOP)
        while self._state() not in "TZ":
            time.sleep(0.001)
        with contextlib.suppress(OSError):  # it has none yet, or none any more
            os.kill(self.first_process(), signal.SIGKILL)
        self.process.kill()

    def _state(self) -> str:
        """Return the letter by which Linux describes the state of its process."""
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2][0]

    def status(self) -> Any:
        """Return the Pod as Kubernetes describes it."""
        code = self.process.poll()
        state: Any = {"running": {}}
        if code is not None:
            code = 128 - code if code < 0 else code
            self.ended = self.ended or now()
            state = {"terminated": {"exitCode": code, "finishedAt": self.ended}}
        conditions = [{"type": "DisruptionTarget", "status": "True"}] if self.is_evicted else []
        status = {"containerStatuses": [{"name": "ronde", "state": state}], "conditions": conditions}
        return {"kind": "Pod", "metadata": {"name": self.name}, "status": status}


class KubernetesCluster:
    """Runs the Job or JobSet that its `kubectl` creates; each Pod gets the next host.

    `image`: the directory of the Pods. `held`: the numbers of Pods for which there is no room now.
    """

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts = hosts
        self.place, self.image = folder / "kubernetes", folder / "image"
        self.place.mkdir()
        self.image.mkdir()
        programs = folder / "programs"
        programs.mkdir()
        kubectl = programs / "kubectl"
        kubectl.write_text(KUBECTL.format(python=sys.executable, place=str(self.place)))
        kubectl.chmod(0o755)
        self.path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self.environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{self.path}"}
        self.pods: list[Pod] = []
        self.held: set[int] = set()
        self.restarts = 0  # of a JobSet
        self._first = 0  # the first Pod since then
        self.error: BaseException | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._control)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closing = True
        self._thread.join()
        for pod in self.pods:
            pod.kill()
            pod.process.wait()
        if self.error:
            raise self.error

    def submit(self, *words: str) -> subprocess.Popen[str]:
        """Start `ronde run --cluster kubernetes` with these words."""
        command = [sys.executable, "-m", "ronde", "run", "--cluster", "kubernetes", "--image", "lab/train"]
        return subprocess.Popen(
            [*command, *words],
            env=self.environment,
            cwd=self.image.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def object(self, kind: str) -> Any:
        """Return the object of that kind as it was created."""
        return json.loads((self.place / f"{kind}.json").read_text())

    def kind(self) -> str:
        """Return the kind of the object that makes the Pods."""
        return "JobSet" if (self.place / "JobSet.json").exists() else "Job"

    def job(self) -> tuple[str, str, Any]:
        """Return the name of the Job, the subdomain of its Pods, and its spec."""
        maker = self.object(self.kind())
        name, spec = maker["metadata"]["name"], maker["spec"]
        if self.kind() == "Job":
            return name, spec["template"]["spec"]["subdomain"], spec
        (replicated,) = spec["replicatedJobs"]
        assert (replicated["replicas"], spec["network"]["enableDNSHostnames"]) == (1, True)
        return f"{name}-{replicated['name']}-0", spec["network"]["subdomain"], replicated["template"]["spec"]

    def calls(self) -> str:
        """Return the calls of kubectl, one on each line."""
        return (self.place / "calls").read_text()

    def pod(self, index: int) -> Pod:
        """Return the present Pod of that index, as soon as there is one."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for pod in reversed(self.pods):
                if pod.index == index:
                    return pod
            time.sleep(TURN_S)
        raise TimeoutError(f"there is no Pod {index}")

    def evict(self, pod: Pod) -> None:
        """End the Pod as Kubernetes does when it empties a node."""
        pod.is_evicted = True
        os.kill(pod.first_process(), signal.SIGTERM)

    def mounted_secret(self, pod: Pod) -> Path:
        """Return a directory like the volume of the Secret: root's files, behind links."""
        (volume,) = (
            each["secret"] for each in self.job()[2]["template"]["spec"]["volumes"] if "secret" in each
        )
        folder = self.place / f"{pod.name}.secret"
        (folder / "..data").mkdir(parents=True)
        for item in volume["items"]:
            file = folder / "..data" / item["path"]
            file.write_text(self.object("Secret")["stringData"][item["key"]])
            file.chmod(volume["defaultMode"])
            (folder / item["path"]).symlink_to(f"..data/{item['path']}")
        return folder

    # The controller

    def _control(self) -> None:
        try:
            while not self._is_closing and not self._has_all_objects():
                time.sleep(TURN_S)
            end: Any = None
            while not self._is_closing:
                if (self.place / "deletion").exists():
                    end = end or {"type": "Deleted"}
                elif end is None:
                    end = self._judge(self._reconcile(self.job()[2]))
                self._stop_pods(self.pods if end else self.pods[: self._first])
                self._publish(end)
                time.sleep(TURN_S)
        except BaseException as error:
            self.error = error

    def _has_all_objects(self) -> bool:
        there = {file.stem for file in self.place.glob("*.json")}
        return {"Job", "Service", "Secret"} <= there or {"JobSet", "Secret"} <= there

    def _judge(self, end: Any) -> Any:
        """Return what the end of the Job means for the object that made it; start the Job of a JobSet again."""
        if end is None or self.kind() == "Job":
            return end
        if end["type"] == "Complete":
            return {"type": "Completed"}
        policy = self.object("JobSet")["spec"]["failurePolicy"]
        (rule,) = policy["rules"]
        assert rule["action"] == "FailJobSet"
        if end["reason"] in rule["onJobFailureReasons"] or self.restarts == policy["maxRestarts"]:
            return {**end, "reason": "FailedJobs"}
        self.restarts, self._first = self.restarts + 1, len(self.pods)
        return None

    def _reconcile(self, spec: Any) -> Any:
        """Start Pods; return the condition that ends the job, None while it goes on."""
        codes: dict[int, list[int | None]] = {}  # by index: how its Pods ended that count, None: it runs
        for pod in self.pods[self._first :]:
            state = pod.status()["status"]["containerStatuses"][0]["state"]
            code = state["terminated"]["exitCode"] if "terminated" in state else None
            action = "Count" if code is None or code == 0 else self._action(spec, pod, code)
            if action == "FailJob":
                message = f"Container ronde for pod lab/{pod.name} failed with exit code {code}"
                return {"type": "Failed", "reason": "PodFailurePolicy", "message": message}
            if action != "Ignore":
                codes.setdefault(pod.index, []).append(code)
        succeeded = {index for index, ends in codes.items() if 0 in ends}
        enough = spec.get("successPolicy", {}).get("rules", [{"succeededCount": spec["completions"]}])
        if len(succeeded) >= enough[0]["succeededCount"]:
            return {"type": "Complete"}
        failed = [index for index, ends in codes.items() if len(ends) > spec["backoffLimitPerIndex"]]
        if len([index for index in failed if None not in codes[index]]) > spec["maxFailedIndexes"]:
            return {"type": "Failed", "reason": "MaxFailedIndexesExceeded", "message": ""}
        for index in range(spec["completions"]):
            is_done = index in failed or index in succeeded or index in self.held
            if not is_done and None not in codes.get(index, []):
                self.pods.append(Pod(self, index, len(self.pods)))
                self._publish_names()
        return None

    def _action(self, spec: Any, pod: Pod, code: int) -> str:
        for rule in spec["podFailurePolicy"]["rules"]:
            if "onPodConditions" in rule and pod.is_evicted:
                return str(rule["action"])
            if "onExitCodes" in rule and code not in rule["onExitCodes"]["values"]:
                assert rule["onExitCodes"]["operator"] == "NotIn"
                return str(rule["action"])
        return "Count"

    def _publish_names(self) -> None:
        """Tell all Pods the addresses of those that run, as the name server does."""
        latest = {pod.index: pod for pod in self.pods[self._first :]}
        lines = {
            index: f"{self.hosts.ipv4(pod.number)}\t{pod.full_name}\t{pod.host_name}\n"
            for index, pod in latest.items()
        }
        for pod in latest.values():
            own = lines[pod.index]
            others = "".join(line for index, line in lines.items() if index != pod.index)
            pod.hosts_file.write_text(f"127.0.0.1\tlocalhost\n{own}{others}")

    def _stop_pods(self, pods: Sequence[Pod]) -> None:
        for pod in pods:
            pod.stop()

    def _publish(self, end: Any) -> None:
        """Write what `kubectl get` answers; the job ends when all Pods have."""
        running = any(pod.process.poll() is None for pod in self.pods)
        conditions = [{**end, "status": "True"}] if end and not running else []
        job = {**self.object(self.kind()), "status": {"conditions": conditions}}
        gone = end is not None and end["type"] == "Deleted" and not running
        items = [] if gone else [job, *(pod.status() for pod in self.pods)]
        (self.place / "state.new").write_text(json.dumps({"items": items}))
        (self.place / "state.new").rename(self.place / "state")


def now() -> str:
    """Return the time as Kubernetes writes it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z")


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Return the text of a command or variable with $(NAME) replaced, and $$ by $, as Kubernetes does it."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\((\w+)\)", value, text)
