"""Fixtures of all tests: they need certain packages and rights, and must leave nothing behind."""

from __future__ import annotations

import faulthandler
import functools
import gc
import multiprocessing.resource_tracker
import os
import re
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from tests.outcomes import Outcomes
from tests.turns import Shared, Turns, Worker

if TYPE_CHECKING:
    from ronde.launch.templates.template import Template

# Also after pytest has ended and its own use of it: `.ci/run` aborts what does not end.
faulthandler.enable(2)

# Every process that a test starts inherits this, so that we find it also after its parent has died.
MARK_NAME, MARK_VALUE = "TEST_RUN_OF_RONDE", f"{os.getpid()}.{time.monotonic_ns()}"
os.environ[MARK_NAME] = MARK_VALUE

# Else each process that imports NumPy spends half of that time on threads which it does not need.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

# The JVMs of Spark and Flink live for seconds. Else they spend half of them on compiling what runs once.
os.environ["JAVA_TOOL_OPTIONS"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

# What runs in the background ignores one or the other, and so would the processes that are tested.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# A machine that does much else takes its time for an example.
hypothesis.settings.register_profile(
    "patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("patient")


@pytest.fixture(scope="session", autouse=True)
def _configuration(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Give all tests and their processes a new configuration directory, for the user's job key."""
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.mktemp("config"))


GRACE_S = 5.0  # how long what is ending may take to end


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--not-again",
        type=Path,
        metavar="FILE",
        help="leave out the tests that FILE names, but for those in files that mention torch: with it installed they "
        "may test more; add those that pass to FILE",
    )
    parser.addoption(
        "--outcomes",
        type=Path,
        metavar="FILE",
        help="add a line to FILE for each test that has run or was skipped (tests/outcomes.py)",
    )


def pytest_configure(config: pytest.Config) -> None:
    of_worker: dict[str, Any] | None = getattr(config, "workerinput", None)  # where xdist has started several
    if of_worker:
        config.pluginmanager.register(Turns(of_worker["turns"]))
    elif config.getoption("numprocesses", None):
        config.pluginmanager.register(Shared(config))
    if (file := config.getoption("--outcomes")) and not of_worker:
        config.pluginmanager.register(Outcomes(file))
    if file := config.getoption("--not-again"):
        config.pluginmanager.register(NotAgain(file, of_worker))


class NotAgain:
    """Restricts a second run, with more packages, to the tests that the first one skipped."""

    def __init__(self, file: Path, of_worker: dict[str, Any] | None) -> None:
        self._file = file
        self._is_worker = of_worker is not None
        self._has_passed: set[str] = set()  # before its fixtures end, one of which may fail
        if of_worker:  # as the others, although the file grows meanwhile
            self._passed = set(of_worker["passed"])
        else:
            self._passed = set(file.read_text().splitlines()) if file.exists() else set()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Worker) -> None:
        node.workerinput["passed"] = sorted(self._passed)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        left_out = [item for item in items if item.nodeid in self._passed and not mentions_torch(item.path)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._is_worker or not report.passed:
            return
        if report.when == "call":
            self._has_passed.add(report.nodeid)
        elif report.when == "teardown" and report.nodeid in self._has_passed:
            with self._file.open("a") as file:
                file.write(report.nodeid + "\n")


# They open connections and shared memory when they need them, and keep them.
ENGINES = ("spark", "ray", "dask", "flink")

ALONE = re.compile("tests/(clusters/test_mpi|soak/)")

# PySpark 3.5 reads the results of a job from a socket of its own, which it leaves to the garbage collector.
LEFT_BY_PYSPARK = r"ignore:unclosed <socket.* proto=6, laddr=\('127\.0\.0\.1':ResourceWarning:socket$"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their folder; all in tests/hosts need root and are slow. Those of an engine get a long timeout."""
    for item in items:
        if any(map(item.get_closest_marker, ENGINES)):
            item.add_marker(pytest.mark.timeout(900))
        elif ALONE.search(item.path.as_posix()):
            item.add_marker("alone")
        if "tests/hosts/" in item.path.as_posix():
            item.add_marker("hosts")
        if item.get_closest_marker("spark"):
            item.add_marker(pytest.mark.filterwarnings(LEFT_BY_PYSPARK))
        if item.get_closest_marker("hosts"):
            item.add_marker("root")
            item.add_marker("slow")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip("needs root")
    if item.get_closest_marker("hosts") and shutil.which("ip") is None:
        pytest.skip("needs the command `ip` (Debian: apt install iproute2)")


@pytest.fixture(scope="session")
def folder_of_all(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the processes of this run of pytest share (`pytest -n 8`)."""
    of_worker: dict[str, Any] | None = getattr(request.config, "workerinput", None)
    return Path(of_worker["turns"]) if of_worker else tmp_path_factory.mktemp("all")


@pytest.fixture(scope="session")
def template_of() -> Iterator[Callable[..., Template]]:
    """Return a function that makes, once, a process that has imported these modules, for `ranks.copies_of`."""
    from ronde.testing import ranks

    with ExitStack() as stack:
        yield functools.cache(lambda *modules: stack.enter_context(ranks.template(*modules)))


@pytest.fixture(scope="module")
def copied_ranks(request: pytest.FixtureRequest, template_of: Callable[..., Template]) -> Iterator[None]:
    """Start ranks with large packages imported, and with torch if the test file mentions it."""
    from ronde.testing import ranks

    modules = [
        "numpy",
        "ml_dtypes",
        "hypothesis",
        "pytest",
        "ronde.comm.communicator",
        "ronde.engine.operations",
    ]
    if mentions_torch(request.path) and find_spec("torch"):
        modules += ["torch.distributed", "ronde.torch"]
    with ranks.copies_of(template_of(*modules)):
        yield


def mentions_torch(file: Path) -> bool:
    return re.search(r"\btorch\b", file.read_text()) is not None


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test after which there are more processes, shared memory, namespaces or open files than before."""
    there = pids()
    kinds: dict[str, Callable[[], Counter[str]]] = {
        "processes": lambda: processes(pids() - there),
        "in /dev/shm": shared_memory,
        "network namespaces": lambda: hosts_in("/run/netns"),
        "network interfaces": lambda: hosts_in("/sys/class/net"),
        "open files": open_files,
    }
    if any(map(request.node.get_closest_marker, ENGINES)):
        kinds = {"processes": kinds["processes"]}
    before = {kind: look() for kind, look in kinds.items()}
    yield
    if kept := sys.modules.get("ronde.launch.templates.template"):  # it may stay until this process ends
        kept.close_kept_template()
    deadline = time.monotonic() + GRACE_S
    left = {kind: look() - before[kind] for kind, look in kinds.items()}
    while any(left.values()) and time.monotonic() < deadline:
        gc.collect()  # what only a cycle of references keeps open is not a leak
        time.sleep(0.02)
        left = {kind: look() - before[kind] for kind, look in kinds.items()}
    found = [f"{kind}: {', '.join(sorted(extra.elements()))}" for kind, extra in left.items() if extra]
    if found:
        pytest.fail("left behind by this test: " + "; ".join(found), pytrace=False)


def pids() -> set[int]:
    """All processes of this machine."""
    return {int(name) for name in os.listdir("/proc") if name.isdecimal()}


def processes(among: Iterable[int]) -> Counter[str]:
    """Return the living or unreaped processes that this one or a test started, as "pid command"."""
    found: Counter[str] = Counter()
    for folder in (Path(f"/proc/{pid}") for pid in among if pid != tracker_of("_pid")):
        try:
            # "pid (command) state parent ...", where the command may contain anything
            command, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
            is_child = int(rest.split()[1]) == os.getpid()
            if is_child or is_of_this_run(folder):
                found[f"{folder.name} {command}"] += 1
        except OSError:
            continue  # it ended while we looked, or is somebody else's
    return found


def is_of_this_run(process: Path) -> bool:
    """Whether this process, or a test of it, has started the one with that directory in /proc."""
    return f"{MARK_NAME}={MARK_VALUE}".encode() in (process / "environ").read_bytes().split(b"\0")


def shared_memory() -> Counter[str]:
    """Return the names in /dev/shm, but for those of processes that another process's tests have started."""
    return Counter(path.name for path in Path("/dev/shm").glob("*") if not belongs_to_another_run(path.name))


def belongs_to_another_run(name: str) -> bool:
    """Whether the name has the id of a living process (`guarded_folder`) that no test of this one started."""
    match = re.match(r"ronde-mpi-(\d+)-", name)
    if not match or int(match[1]) == os.getpid():
        return False
    try:
        return not is_of_this_run(Path("/proc", match[1]))
    except OSError:
        return False  # it has ended and should have removed it


def hosts_in(folder: str) -> Counter[str]:
    """Names that `ronde.testing.hosts` has made, but for those of other living processes, which run tests, too."""
    found = Counter[str]()
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        if match := re.match(r"ronde-(\d+)", name):
            if int(match[1]) == os.getpid() or not Path("/proc", match[1]).exists():
                found[name] += 1
    return found


def open_files() -> Counter[str]:
    """Return the targets of this process's file descriptors, by kind if the name is only a number."""
    found: Counter[str] = Counter()
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            target = os.readlink(entry)
        except FileNotFoundError:
            continue  # the one that listed the folder
        if int(entry.name) != tracker_of("_fd"):
            found[target.split("[")[0]] += 1  # "socket:[123]"
    return found


def tracker_of(attribute: str) -> int | None:
    """The process or pipe of multiprocessing's resource tracker, which lives as long as this process."""
    tracker = multiprocessing.resource_tracker._resource_tracker
    return getattr(tracker, attribute, None)
