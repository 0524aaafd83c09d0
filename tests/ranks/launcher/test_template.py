"""Workers that are forked from a template, compared with new processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ronde.launch.agent.agent import run_agent
from ronde.launch.config import Binding, LaunchConfig, WorkerSpec
from ronde.launch.templates.template import Template, command_of
from ronde.process.process_groups import GroupLeader, Process
from ronde.settings import environment

HANGING_NS = 100 * 10**9


class Templates:
    """Makes templates, and closes them after the test."""

    def __init__(self) -> None:
        self.made: list[Template] = []

    def make(self, argv: list[str], modules: list[str] | None = None, **more: str) -> Template:
        self.made.append(Template(argv, environment() | more, modules))
        return self.made[-1]

    def ready(self, argv: list[str], modules: list[str] | None = None, **more: str) -> Template:
        template = self.make(argv, modules, **more)
        assert template.is_ready(time.monotonic_ns() + HANGING_NS), template.problem
        return template


@pytest.fixture
def templates() -> Iterator[Templates]:
    made = Templates()
    yield made
    for template in made.made:
        template.close()


@pytest.fixture(autouse=True)
def in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, text: str) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(textwrap.dedent(text))


def end(process: GroupLeader | None) -> tuple[int, str, str]:
    """Return exit code, standard output and standard error."""
    assert process is not None
    texts = []
    for pipe in (process.stdout, process.stderr):
        assert pipe is not None
        with pipe:
            texts.append(pipe.read().decode())
    return process.reap(), texts[0], texts[1]


def both(templates: Templates, argv: list[str]) -> tuple[tuple[int, str, str], tuple[int, str, str]]:
    """Return how a command ends as a new process, and how from a template."""
    fresh = end(Process(argv, environment()))
    return fresh, end(templates.ready(argv).start_worker(argv, environment()))


# A worker finds what it would find in a process of its own.

LOOK = """
'''The doc.'''
from __future__ import annotations
import os, signal, sys
names = "__name__", "__file__", "__doc__", "__package__", "__cached__"
print({name: globals().get(name, "missing") for name in names}, type(__loader__), __spec__ and __spec__.name)
print(__builtins__, sorted(globals()))
print(sys.argv, sys.orig_argv, sys.path, sys.flags, sys.executable, sys.warnoptions, sys._xoptions)
print(sys.modules["__main__"].names is names, os.getcwd(), sys.stdin.read(), sorted(os.environ.items()))
print([stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)], sys.stdout.line_buffering)
print(sys.stdout.write_through, sys.stdout.encoding, os.getpid() == os.getpgid(0) == os.getsid(0))
print([(number, signal.getsignal(number)) for number in range(1, 32)], signal.pthread_sigmask(0, []))
print(sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:3], len(os.listdir("/proc/self/task")))
import threading, multiprocessing
print(threading.current_thread() is threading.main_thread(), multiprocessing.current_process().name)
class Own: pass
import pickle
print(pickle.loads(pickle.dumps(Own)) is Own)
"""


@pytest.mark.parametrize(
    "command",
    [
        ["script.py", "a", "--b", ""],
        ["./folder/link.py"],
        ["-u", "-X", "dev", "-Wdefault", "-O", "folder/script.py", "-m"],
        ["-m", "module", "-x"],
        ["-m", "folder.package"],
        ["-P", "script.py"],
    ],
    ids=" ".join,
)
def test_a_worker_finds_everything_in_its_place(templates: Templates, command: list[str]) -> None:
    for name in ("script.py", "module.py", "folder/script.py", "folder/package/__main__.py"):
        write(name, LOOK)
    Path("folder/link.py").symlink_to("../script.py")
    fresh, forked = both(templates, [sys.executable, *command])
    assert forked == fresh
    assert fresh[0] == 0


AT_THE_END = """
import atexit, threading, time
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
print("main")
"""


ENDINGS = [
    "print('out'); import sys; print('err', file=sys.stderr)",
    "import sys; sys.exit(3)",
    "import sys; sys.exit('a sentence')",
    "def f():\n    raise ValueError('the cause')\nf()",
    "import helper",
    "this is no Python",
    "import os; os._exit(7)",
    "import os; os.kill(os.getpid(), 9)",
    "import os, signal; os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(60)",
    AT_THE_END,
    "class C:\n    def __del__(self): print('deleted')\nc = C()",
    "import sys\nsys.excepthook = lambda *a: print('hook', a[0])\nraise ValueError",
]


def test_a_worker_ends_like_a_new_process(templates: Templates) -> None:
    write("script.py", "pass")
    write("helper.py", "raise OSError('in the helper')")
    argv = [sys.executable, "script.py"]
    template = templates.ready(argv)
    for text in ENDINGS:
        write("script.py", text)
        fresh, forked = end(Process(argv, environment())), end(template.start_worker(argv, environment()))
        assert forked == fresh, text


def test_a_program_that_makes_processes(templates: Templates) -> None:
    """multiprocessing spawns by importing the main module again."""
    write(
        "script.py",
        """
        import multiprocessing
        def double(x): return 2 * x
        if __name__ == "__main__":
            for method in ("fork", "spawn"):
                with multiprocessing.get_context(method).Pool(2) as pool:
                    print(pool.map(double, range(3)))
        """,
    )
    fresh, forked = both(templates, [sys.executable, "script.py"])
    assert forked == fresh == (0, "[0, 2, 4]\n" * 2, "")


def test_random_numbers_differ_between_workers(templates: Templates) -> None:
    write("script.py", "import numpy, random; print(random.random(), numpy.random.random())")
    argv = [sys.executable, "script.py"]
    template = templates.ready(argv)
    numbers = [end(template.start_worker(argv, environment()))[1].split() for _ in range(3)]
    assert len({number for worker in numbers for number in worker}) == 6


def test_a_worker_gets_what_it_is_given(templates: Templates) -> None:
    write(
        "script.py",
        """
        import os, sys
        print(os.environ["RANK"], os.environ.get("GONE"), os.sched_getaffinity(0), os.pread(int(sys.argv[1]), 99, 0))
        """,
    )
    core = min(os.sched_getaffinity(0))
    given = os.memfd_create("given")
    os.write(given, b"for all")
    argv = [sys.executable, "script.py", str(given)]
    template = templates.ready(argv, GONE="still here")
    with open("out", "wb") as out:
        worker = template.start_worker(
            argv, environment() | {"RANK": "7"}, stdout=out.fileno(), keep=[given], cores=[core]
        )
    assert worker is not None
    assert worker.stdout is None
    assert worker.stderr is not None
    with worker.stderr:
        assert worker.stderr.read() == b""
    assert worker.reap() == 0
    os.close(given)
    assert Path("out").read_text() == f"7 None {{{core}}} b'for all'\n"


# Endings of the template.


def test_workers_die_with_the_template_and_are_found_dead(templates: Templates) -> None:
    write("script.py", "import os; print(os.getppid(), flush=True); import time; time.sleep(600)")
    argv = [sys.executable, "script.py"]
    template = templates.ready(argv)
    worker = template.start_worker(argv, environment())
    assert worker is not None
    assert worker.stdout is not None
    os.kill(int(worker.stdout.readline()), signal.SIGKILL)
    assert end(worker) == (-signal.SIGKILL, "", "")
    assert template.start_worker(argv, environment()) is None
    assert template.problem


def test_template_and_workers_die_with_the_launcher(tmp_path: Path) -> None:
    write("worker.py", "import time; print('ready', flush=True); time.sleep(600)")
    write(
        "launcher.py",
        """
        import os, sys, time
        from ronde.launch.templates.template import Template
        from ronde.settings import environment
        argv = [sys.executable, "worker.py"]
        template = Template(argv, environment())
        assert template.is_ready(time.monotonic_ns() + 10**11)
        worker = template.start_worker(argv, environment(), stdout=1, stderr=2)
        time.sleep(600)
        """,
    )
    launcher = subprocess.Popen([sys.executable, "launcher.py"], stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    with launcher.stdout:
        assert launcher.stdout.readline() == b"ready\n"
        launcher.kill()
        assert launcher.stdout.read() == b"", "all ends of the pipe are closed: template and worker are gone"
    launcher.wait()


def test_groups_are_signalled_whole(templates: Templates) -> None:
    write(
        "script.py", "import subprocess; subprocess.Popen(['sleep', '600']); print('x', flush=True); input()"
    )
    argv = [sys.executable, "script.py"]
    worker = templates.ready(argv).start_worker(argv, environment())
    assert worker is not None
    assert worker.stdout is not None
    assert worker.stdout.readline() == b"x\n"
    pidfds = worker.open_group()
    for pidfd in pidfds:
        os.close(pidfd)
    worker.signal_group(signal.SIGTERM)
    end(worker)  # the pipes are at their end: nobody is left


# When there is none.


@pytest.mark.parametrize(
    ("imports", "problem"),
    [
        (
            "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
            "the imports have started threads, which a worker would lack: ",
        ),
        (  # a signal for one worker would wake another
            "import os, signal; signal.set_wakeup_fd(os.open('/dev/null', os.O_WRONLY | os.O_NONBLOCK))",
            "the imports have set a wakeup descriptor for signals, which all workers would share",
        ),
    ],
)
def test_imports_that_make_no_template(templates: Templates, imports: str, problem: str) -> None:
    write("script.py", "pass")
    write("imported.py", imports)
    argv = [sys.executable, "script.py"]
    template = templates.make(argv, ["imported"])
    assert not template.is_ready(time.monotonic_ns() + HANGING_NS)
    assert template.problem is not None
    assert template.problem.startswith(problem)
    assert template.start_worker(argv, environment()) is None


def test_pyarrow_makes_a_template(templates: Templates) -> None:
    """Its allocator starts a thread unless a variable forbids that; the workers do not have the variable."""
    pytest.importorskip("pyarrow")
    write(
        "script.py", "import os, sys; print('pyarrow' in sys.modules, 'JE_ARROW_MALLOC_CONF' in os.environ)"
    )
    argv = [sys.executable, "script.py"]
    template = templates.make(argv, ["pyarrow"])
    assert template.is_ready(time.monotonic_ns() + HANGING_NS), template.problem
    assert end(template.start_worker(argv, environment())) == (0, "True False\n", "")


def test_imports_that_fail_are_left_to_the_worker(templates: Templates) -> None:
    write("script.py", "print('hello')")
    argv = [sys.executable, "script.py"]
    assert end(templates.ready(argv, ["no_such_module"]).start_worker(argv, environment()))[1] == "hello\n"


def test_what_is_read_at_the_start_must_be_the_same(templates: Templates) -> None:
    write("script.py", "pass")
    argv = [sys.executable, "script.py"]
    template = templates.ready(argv)
    assert template.start_worker(argv, environment() | {"OMP_NUM_THREADS": "77"}) is None
    assert template.start_worker([sys.executable, "-O", "script.py"], environment()) is None
    assert template.problem == ""
    assert end(template.start_worker(argv, environment()))[0] == 0


@pytest.mark.parametrize(
    ("words", "at"),
    [
        ("script.py -m x", 1),
        ("-m module", 1),
        ("-u -X dev -Wx script.py", 5),
        ("-c pass", None),
        ("-", None),
        ("script", None),
        ("-m", None),
        ("", None),
    ],
)
def test_which_commands_can_have_a_template(words: str, at: int | None) -> None:
    assert command_of((sys.executable, *words.split())) == at
    assert command_of(["/bin/sh", *words.split()]) is None


# In a job.


def run_job(text: str, **spec: object) -> int:
    write("script.py", "import os, sys, time\nrank = int(os.environ['RANK'])\n" + textwrap.dedent(text))
    worker = WorkerSpec((sys.executable, "script.py"), 2, **spec)  # type: ignore[arg-type]
    return run_agent(LaunchConfig(worker), environment()).exit_code


FORKED = "forked = b'zygote.py' in open(f'/proc/{os.getppid()}/cmdline', 'rb').read()\n"


def test_workers_that_are_started_again_come_from_a_template(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_job(FORKED + "time.sleep(0.2)\nif not forked: sys.exit(5)\nprint(rank)", max_restarts=100) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] 0", "[1] 1"]


def test_all_workers_may_come_from_a_template(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_job(FORKED + "print(forked)", fork=True) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] True", "[1] True"]


def test_ronde_works_in_workers_from_a_template(capfd: pytest.CaptureFixture[str]) -> None:
    text = """
        import numpy, ronde
        loaded = "ronde.engine.process" in sys.modules
        ronde.init()
        print(loaded, ronde.allreduce(numpy.ones(3), name="a", op=ronde.Sum))
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), 9)
    """
    assert run_job(text, fork=True, max_restarts=1, environment={"OMP_NUM_THREADS": "3"}) == 0
    lines = capfd.readouterr().out.splitlines()
    assert {line[4:] for line in lines} == {"True [2. 2. 2.]"}
    assert len(lines) >= 3


def test_without_a_template_restarts_work_too(capfd: pytest.CaptureFixture[str]) -> None:
    text = FORKED + "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': sys.exit(5)\nprint(forked)"
    assert run_job(text, max_restarts=1, preload=()) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] False", "[1] False"]


def test_an_unfit_template_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    write(
        "threads.py",
        "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    )
    assert run_job("print(rank)", fork=True, preload=("threads",)) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[0] 0", "[1] 1"]
    assert "ronde: workers import modules themselves, without the template: the imports have" in err


def test_ctrl_c_during_the_imports_starts_no_worker() -> None:
    write("slow.py", "import time; open('importing', 'w').close(); time.sleep(100)")
    write("script.py", "print('here')")
    options = ("--start-method", "forkserver", "--preload", "slow")
    process = subprocess.Popen(
        [sys.executable, "-m", "ronde", "run", *options, "script.py"], stdout=subprocess.PIPE, text=True
    )
    while not os.path.exists("importing"):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")


def test_a_signal_while_a_fork_is_waited_for_ends_the_job() -> None:
    """The template stops after the first worker; the job neither waits for the second one nor starts it otherwise."""
    write(
        "stops.py",
        """
        import os, signal
        forks = []
        def child():
            if len(forks) == 2:  # the first one was for a trial
                os.kill(os.getppid(), signal.SIGSTOP)
        os.register_at_fork(before=lambda: forks.append(0), after_in_child=child)
        """,
    )
    write("script.py", "import os, time; open(f\"here{os.environ['RANK']}\", 'w').close(); time.sleep(600)")
    options = ("-n", "2", "--start-method", "forkserver", "--preload", "stops")
    process = subprocess.Popen(
        [sys.executable, "-m", "ronde", "run", *options, "script.py"], stderr=subprocess.PIPE, text=True
    )
    while not os.path.exists("here0"):
        assert process.poll() is None
        time.sleep(0.02)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, os.path.exists("here1")) == (143, False)
    assert err.startswith("ronde: ended by SIGTERM: SIGTERM to rank 0\nronde: ended by SIGTERM\n")


def test_a_signal_that_the_caller_handles_itself_costs_no_template() -> None:
    """It comes during the wait for the second worker, and must not end the first one."""
    write(
        "nudges.py",
        """
        import os, signal, time
        forks = []
        def before():
            forks.append(0)
            if len(forks) == 3:  # the first one was for a trial
                os.kill(os.getppid(), signal.SIGUSR1)
                time.sleep(0.3)
        os.register_at_fork(before=before)
        """,
    )
    write(
        "calls.py",
        """
        import os, signal
        from ronde.launch.callables import ElasticLaunch
        from ronde.launch.config import LaunchConfig, WorkerSpec
        def parent(): return os.getppid()
        if __name__ == "__main__":
            signal.signal(signal.SIGUSR1, lambda *_: print("heard"))
            worker = WorkerSpec(argv=(), slots=2, preload=("nudges",))
            parents = ElasticLaunch(LaunchConfig(worker), parent, start_method="forkserver")()
            print(len({*parents.values()} - {os.getpid()}))
        """,
    )
    done = subprocess.run(
        [sys.executable, "calls.py"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((".", os.environ.get("PYTHONPATH", "")))},
        capture_output=True,
        text=True,
        timeout=HANGING_NS / 1e9,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "heard\n1\n"), done.stderr


@pytest.mark.parametrize("fork", [False, True])
def test_workers_are_bound(capfd: pytest.CaptureFixture[str], fork: bool) -> None:
    cores = sorted(os.sched_getaffinity(0))
    assert run_job("print(len(os.sched_getaffinity(0)))", binding=Binding.CORES, fork=fork) == 0
    counts = [int(line[4:]) for line in capfd.readouterr().out.splitlines()]
    assert sum(counts) == max(2, len(cores))
