"""The process that runs the tests of one suite of PyTorch; torch_suites.py starts it and reads its reports.

What it changes about the tests, all in memory:

- The suite `distributed` decides by the name of its backend which tests to run. It gets a name that equals each of
  `counts_as`, so that no test is skipped, or passes early, because the suite does not know the backend.
- With `--on-cpu`, the text of a file names the CPU where it names CUDA, and no test asks for GPUs.
- In files, a process group that would be Gloo's, or is given no name on a machine without an accelerator, is the
  backend's. Groups of other backends (fake, threaded) stay what they are.
- Ranks are forked, not spawned: the imports take longer than most tests.
- A test fails if its ranks end with different statuses; PyTorch looks at rank 0 only.
- A failure does not make PyTorch skip the tests after it in the class.
"""

from __future__ import annotations

import collections
import functools
import importlib
import importlib.util
import inspect
import json
import logging
import os
import re
import sys
import tempfile
import time
import types
import unittest
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

MODULE = "torch.testing._internal.distributed.distributed_test"
# Imported first, so that what they take from torch.distributed can be replaced.
HELPERS = [f"torch.testing._internal.{name}" for name in ["common_distributed", "common_fsdp"]]
REASON_LENGTH = 300

CLAIMED_GPUS = 4
# Pattern and replacement: what `--on-cpu` changes in a file of tests. `torch.cpu` has streams, too.
ON_CPU = [
    (r"torch\.cuda\.device_count\(\)", str(CLAIMED_GPUS)),
    (r"torch\.cuda\.(_sleep|set_device)\b", "id"),
    (r"torch\.cuda\.manual_seed\b", "torch.manual_seed"),
    (r"torch\.cuda\.(?!is_available)", "torch.cpu."),
    (r"torch\.device\(\s*\"cuda\", [^()]*(\([^()]*\))?\)", 'torch.device("cpu")'),
    (r"(?<!type=)f?([\"'])cuda(:[^\"']*)?\1", '"cpu"'),
    (r"\.cuda\([^()]*(\(\))?\)", ".cpu()"),
    (r"\bdevice_ids=\[[^\]]*\]", "device_ids=None"),
    (r"@([\w.]*\.)?(skip_if_lt_x_gpu|skip_if_no_gpu|requires_nccl)\b(\([^()]*\))?", ""),
    (
        r"@unittest\.skipIf\(\s*not (TEST_CUDA|TEST_MULTIGPU|HAS_CUDA|HAS_GPU)\b[^()]*(\([^()]*\))?[^()]*\)",
        "",
    ),
]


@dataclass(frozen=True)
class Suite:
    """Which tests to run with which backend."""

    name: str
    path: str  # of a file of tests; "" for the suite that PyTorch has installed
    backend: str
    register: list[str]  # modules to import, so that torch.distributed knows the backend
    counts_as: list[str]
    events: bool  # whether the profiler must see the backend's operations, as with Gloo
    ranks: int
    part: str  # of the names of the tests to run
    limit_s: int
    on_cpu: bool  # tests of CUDA use the CPU
    done: list[str]  # tests to leave out


class BackendName(str):
    """The name of a backend that compares equal to the names of other backends as well."""

    _others: list[str]

    def __new__(cls, name: str, others: list[str]) -> BackendName:
        self = super().__new__(cls, name)
        self._others = others
        return self

    def __eq__(self, other: object) -> bool:
        return other in self._others or str.__eq__(self, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:  # the first one's: sets with that name contain this one
        return hash(self._others[0])


class RankNotes:
    """What ranks tell the process that runs their test, by a file that they inherit."""

    def __init__(self) -> None:
        with tempfile.NamedTemporaryFile(delete=False) as file:
            path = file.name
        self._file = os.open(path, os.O_RDWR | os.O_APPEND)
        os.unlink(path)

    def add(self, kind: str, text: str = "") -> None:
        """Note something, from any process."""
        os.write(self._file, f"{kind} {text}\n".encode())

    def take(self) -> list[tuple[str, str]]:
        """Return all notes, kind and text, and forget them."""
        content = os.pread(self._file, os.fstat(self._file).st_size, 0).decode(errors="replace")
        os.ftruncate(self._file, 0)
        pairs = (line.partition(" ") for line in content.splitlines())
        return [(kind, text) for kind, _, text in pairs]

    def close(self) -> None:
        os.close(self._file)


class SkipReasons(logging.Handler):
    """Notes why a rank skipped its test: the exit status only says that it did."""

    def __init__(self, notes: RankNotes) -> None:
        super().__init__()
        self._notes = notes

    def emit(self, record: logging.LogRecord) -> None:
        if "skipping test" in str(record.msg) and isinstance(record.args, tuple):
            self._notes.add("skip", " ".join(str(record.args[-1]).split()))


class Reporter(unittest.TestResult):
    """Writes a line of JSON when a test begins, and another one when it has ended."""

    def __init__(self, reports: int, notes: RankNotes) -> None:
        super().__init__()
        self._reports = reports
        self._notes = notes
        self._began = 0.0
        self._outcome, self._reason = "", ""

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().startTest(test)
        self._notes.take()
        self._began = time.monotonic()
        self._outcome, self._reason = "fail", "ended without a result"
        report(self._reports, {"event": "begin", "test": short_id(test)})

    def stopTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().stopTest(test)
        notes = self._notes.take()
        kinds = collections.Counter(kind for kind, _ in notes)
        reasons = [text for kind, text in notes if kind == "skip"]
        if self._outcome == "skip" and "subprocess" in self._reason and reasons:
            self._reason = reasons[0]
        result = {
            "test": short_id(test),
            "outcome": self._outcome,
            "groups": kinds["group"],
            "calls": kinds["call"],
            "seconds": round(time.monotonic() - self._began, 1),
            "reason": self._reason[:REASON_LENGTH],
        }
        report(self._reports, {"event": "end", "result": result})

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self._outcome, self._reason = "pass", ""

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        self._outcome, self._reason = "skip", reason

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self._outcome, self._reason = "pass", ""

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self._outcome, self._reason = "fail", "passed, but PyTorch expects a failure"

    def addError(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self._fail(test, err)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self._fail(test, err)

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:  # noqa: N802
        if err is not None:
            self._fail(test, err)

    def _fail(self, test: unittest.TestCase, err: Any) -> None:
        text = self._exc_info_to_string(err, test)  # type: ignore[attr-defined]
        print(f"FAIL {test.id()}\n{text}", file=sys.stderr, flush=True)
        self._outcome, self._reason = "fail", shorten_failure(text)
        start_anew(type(test))


def short_id(test: unittest.TestCase) -> str:
    """Return class and method."""
    return ".".join(test.id().split(".")[-2:])


def shorten_failure(text: str) -> str:
    """Return the errors of a traceback in one line: those of all ranks, equal ones once."""
    parts = re.split(r"Process (\d+) exited with error code \d+ and exception:\n", text)
    if len(parts) == 1:
        return last_error(text)
    ranks: dict[str, list[str]] = {}
    for rank, part in zip(parts[1::2], parts[2::2]):
        ranks.setdefault(last_error(part), []).append(rank)
    return "; ".join(f"rank {','.join(of)}: {error}" for error, of in ranks.items())


def last_error(text: str) -> str:
    """Return the line of a traceback that names the exception, with the start of what follows it."""
    errors = list(
        re.finditer(r"^(?:[A-Za-z_][\w.]*)(?:Error|Exception|Exit|Interrupt|Skip\w*)\b.*$", text, re.M)
    )
    if not errors:
        return " ".join(text.split())[-REASON_LENGTH:]
    following = re.split(r"\n(?:Exception raised from|To execute this test)", text[errors[-1].start() :])[0]
    return " ".join(following.split())[:REASON_LENGTH]


def report(to: int, message: dict[str, Any]) -> None:
    """Write a line of JSON."""
    os.write(to, json.dumps(message).encode() + b"\n")


def replace_everywhere(original: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    """Put a function in the place of another one, in all modules of PyTorch that have imported it."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torch") and isinstance(module, types.ModuleType):
            for attribute, value in list(vars(module).items()):
                if value is original:
                    setattr(module, attribute, replacement)


def rename_gloo(requested: object, backend: str) -> object:
    """Return what to ask for instead: the backend in the place of Gloo.

    >>> rename_gloo("cpu:gloo,cuda:nccl", "ronde")
    'cpu:ronde,cuda:nccl'
    """
    if not isinstance(requested, str):
        return requested
    return (
        re.sub(r"\bgloo\b", backend, str(requested).lower())
        if "gloo" in requested.lower()
        else str(requested)
    )


def name_backend(backend: str) -> None:
    """Let functions that make process groups make the backend's where they would make Gloo's."""
    import torch
    from torch.distributed import distributed_c10d as c10d

    for name in [
        "init_process_group",
        "new_group",
        "new_subgroups",
        "new_subgroups_by_enumeration",
        "split_group",
    ]:
        original = getattr(c10d, name)
        signature = inspect.signature(original)

        @functools.wraps(original)
        def renamed(
            *args: Any,
            _original: Callable[..., Any] = original,
            _signature: inspect.Signature = signature,
            _name: str = name,
            **kwargs: Any,
        ) -> Any:
            call = _signature.bind(*args, **kwargs)
            requested = call.arguments.get("backend")
            if requested is not None:
                call.arguments["backend"] = rename_gloo(requested, backend)
            elif _name == "init_process_group" and not torch.accelerator.is_available():
                call.arguments["backend"] = backend
            return _original(*call.args, **call.kwargs)

        replace_everywhere(original, renamed)


def note_use(backend: str, notes: RankNotes) -> None:
    """Note each group of the backend that a rank makes, and each call."""
    from torch.distributed import distributed_c10d as c10d
    from torch.nn.parallel import DistributedDataParallel

    make_group, is_outside, init_ddp = (
        c10d._new_process_group_helper,
        c10d._rank_not_in_group,
        DistributedDataParallel.__init__,
    )

    @functools.wraps(make_group)
    def noted_group(*args: Any, **kwargs: Any) -> Any:
        made = make_group(*args, **kwargs)
        named = inspect.signature(make_group).bind(*args, **kwargs).arguments["backend"]
        if backend in str(named):
            notes.add("group")
        return made

    @functools.wraps(is_outside)
    def noted_call(*args: Any, **kwargs: Any) -> Any:  # every function that communicates asks this
        notes.add("call")
        return is_outside(*args, **kwargs)

    @functools.wraps(init_ddp)
    def noted_ddp(*args: Any, **kwargs: Any) -> Any:  # communicates in C++
        notes.add("call")
        return init_ddp(*args, **kwargs)

    replace_everywhere(make_group, noted_group)
    replace_everywhere(is_outside, noted_call)
    DistributedDataParallel.__init__ = noted_ddp


def fork_ranks(limit_s: int) -> None:
    """Let tests with processes fork them, end after `limit_s` seconds, and look at all ranks' statuses."""
    import torch
    from torch.testing._internal import common_distributed

    torch.multiprocessing.set_start_method("fork", force=True)
    common_distributed.TIMEOUT_OVERRIDE = dict.fromkeys(common_distributed.TIMEOUT_OVERRIDE, limit_s)
    base = common_distributed.MultiProcessTestCase
    check = base._check_return_codes

    def fork(self: Any) -> None:
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    def check_all(self: Any, *arguments: Any) -> None:
        check(self, *arguments)
        # The arguments are the function and the seconds that it took; before PyTorch 2.8 only the seconds.
        fn = arguments[0] if len(arguments) > 1 else getattr(self, self._current_test_name())
        statuses = [process.exitcode for process in self.processes]
        special = getattr(self, "special_return_code_checks", ())  # since PyTorch 2.8
        expected = fn in self.skip_return_code_checks or fn in special
        if not expected and len(set(statuses)) > 1:
            raise AssertionError(f"the ranks ended with different statuses: {statuses}")

    base._spawn_processes, base._check_return_codes = fork, check_all


def start_anew(case: type) -> None:
    """Let the next test of a class whose ranks stay between tests start new ones, instead of being skipped."""
    if getattr(case, "_processes_spawned", False):
        for process in case.processes:  # type: ignore[attr-defined]
            process.kill()
            process.join()
        case._processes_spawned = False  # type: ignore[attr-defined]
        case.poison_pill = False  # type: ignore[attr-defined]


def installed_suite(suite: Suite) -> types.ModuleType:
    """Return a module with the tests that PyTorch has installed, as a class that starts ranks."""
    from torch.testing._internal.common_distributed import DistTestCases

    name = BackendName(suite.backend, suite.counts_as)
    DistTestCases.backend_feature["plugin"].add(suite.backend)
    again = f"file://{tempfile.mkdtemp()}/again"  # for the one test that initializes a second time
    environment = collections.ChainMap[str, str]({"BACKEND": name, "INIT_METHOD": again}, os.environ)
    with mock.patch.object(os, "environ", environment):
        tests: Any = importlib.import_module(MODULE)
    if suite.events:
        for table in ["PROFILING", "CUDA_PROFILING", "SEND_RECV_PROFILING"]:
            getattr(tests, f"{table}_SUPPORTED_BACKENDS").append(suite.backend)
    # At run time only the tests for at least 8 ranks, or an even number, ask for it.
    os.environ["BACKEND"] = "mpi" if "mpi" in suite.counts_as else suite.backend

    class TestDistributed(tests.TestDistBackend, tests.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._spawn_processes()

    module = types.ModuleType(suite.name)
    TestDistributed.__module__ = suite.name
    module.TestDistributed = TestDistributed  # type: ignore[attr-defined]
    return module


def load_file(path: Path, on_cpu: bool) -> types.ModuleType:
    """Import a file of tests; what lies beside it, and its folder `test`, can be imported too.

    `on_cpu`: its tests of CUDA use the CPU.
    """
    sys.path[:0] = [str(path.parent), *(str(folder) for folder in path.parents if folder.name == "test")]
    sys.argv = [str(path)]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None:
        raise ImportError(f"{path} is not a file of Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    text = path.read_text(encoding="utf-8")
    exec(compile(put_on_cpu(text) if on_cpu else text, str(path), "exec"), vars(module))
    return module


def put_on_cpu(text: str) -> str:
    """Return the text of a file of tests with the CPU in the place of CUDA, and without demands for GPUs.

    >>> put_on_cpu('x = torch.ones(2, device="cuda").cuda()')
    'x = torch.ones(2, device="cpu").cpu()'
    """
    for pattern, replacement in ON_CPU:
        text = re.sub(pattern, replacement, text)
    return text


def claim_accelerators() -> None:
    """Let the base class of FSDP's tests start ranks on a machine without accelerators."""
    import torch

    if hasattr(torch, "accelerator"):  # since PyTorch 2.6
        torch.accelerator.device_count = lambda: CLAIMED_GPUS


def cases_of(tests: unittest.TestSuite | unittest.TestCase) -> Iterator[unittest.TestCase]:
    """Yield the tests of a tree."""
    if isinstance(tests, unittest.TestSuite):
        for part in tests:
            yield from cases_of(part)
    else:
        yield tests


def load(suite: Suite) -> unittest.TestSuite:
    """Return the tests that are to run."""
    try:
        module = load_file(Path(suite.path), suite.on_cpu) if suite.path else installed_suite(suite)
    except SystemExit as ended:
        raise ImportError(f"the file ends when it is imported, with status {ended.code}") from None
    loaded = unittest.defaultTestLoader.loadTestsFromModule(module)
    chosen = [
        case for case in cases_of(loaded) if suite.part in case.id() and short_id(case) not in suite.done
    ]
    return unittest.TestSuite(chosen)


def main() -> None:
    reports, suite = int(sys.argv[1]), Suite(**json.loads(sys.argv[2]))
    os.set_inheritable(reports, False)
    notes = RankNotes()
    try:
        for module in [*suite.register, *HELPERS]:
            importlib.import_module(module)
    except ImportError as error:
        report(reports, {"event": "none", "reason": f"cannot start: {error}"})
        return
    logging.getLogger("torch.testing._internal.common_distributed").addHandler(SkipReasons(notes))
    fork_ranks(suite.limit_s)
    if suite.on_cpu:
        claim_accelerators()
    name_backend(suite.backend)
    note_use(suite.backend, notes)
    try:
        tests = load(suite)
    except (ImportError, AttributeError, ValueError) as error:
        report(reports, {"event": "none", "reason": f"cannot be imported: {error}"})
        return
    tests.run(Reporter(reports, notes))


if __name__ == "__main__":
    main()
