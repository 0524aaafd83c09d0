"""How results of PyTorch's suites are counted, compared and shortened; no PyTorch needed."""

from __future__ import annotations

import pytest
from torch_suite_process import BackendName, RankNotes, put_on_cpu, rename_gloo, shorten_failure
from torch_suites import SuiteResult, print_comparison, print_counts

FAILED = """RuntimeError: Process 0 exited with error code 10 and exception:
Traceback (most recent call last):
  File "x.py", line 1, in f
ValueError: first

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "x.py", line 2, in g
ronde.errors.TimeoutError: waited
  for rank 1
Exception raised from f at x.cpp:1

Process 1 exited with error code 10 and exception:
Traceback (most recent call last):
AssertionError: no

To execute this test, run the following from the base repo dir:

Process 2 exited with error code 10 and exception:
Traceback (most recent call last):
AssertionError: no
"""


def result(test: str, outcome: str, groups: int = 4, calls: int = 4, reason: str = "") -> SuiteResult:
    return SuiteResult("suite", test, outcome, groups, calls, 0.1, reason)


def test_a_name_equals_those_it_counts_as() -> None:
    name = BackendName("ronde", ["gloo", "mpi"])
    assert name == "ronde"
    assert name == "gloo"
    assert name == "mpi"
    assert not (name != "mpi")  # noqa: SIM202
    assert name != "nccl"
    assert name in {"nccl", "gloo"}
    assert name not in {"nccl", "ucc"}
    assert name.lower() == "ronde"


@pytest.mark.parametrize(
    ("asked", "made"),
    [("gloo", "ronde"), ("cpu:gloo,cuda:nccl", "cpu:ronde,cuda:nccl"), ("fake", "fake"), (None, None)],
)
def test_gloo_is_renamed(asked: str | None, made: str | None) -> None:
    assert rename_gloo(asked, "ronde") == made


@pytest.mark.parametrize(
    ("cuda", "cpu"),
    [
        ('x.to("cuda")', 'x.to("cpu")'),
        ("model.cuda().half()", "model.cpu().half()"),
        ('torch.device("cuda", torch.cuda.current_device())', 'torch.device("cpu")'),
        ('x.to(f"cuda:{rank}")', 'x.to("cpu")'),
        ("min(8, torch.cuda.device_count())", "min(8, 4)"),
        ("DDP(model, device_ids=[rank])", "DDP(model, device_ids=None)"),
        ("with torch.cuda.stream(s):", "with torch.cpu.stream(s):"),
        ("if torch.cuda.is_available():", "if torch.cuda.is_available():"),
        ("    @skip_if_lt_x_gpu(2)\n    def test(self):", "    \n    def test(self):"),
        (r"device\(type='cuda'\)", r"device\(type='cuda'\)"),  # a part of an expected message
    ],
)
def test_the_cpu_takes_the_place_of_cuda(cuda: str, cpu: str) -> None:
    assert put_on_cpu(cuda) == cpu


def test_a_failure_is_the_last_error_of_each_rank() -> None:
    assert shorten_failure(FAILED) == (
        "rank 0: ronde.errors.TimeoutError: waited for rank 1; rank 1,2: AssertionError: no"
    )


def test_notes_are_taken_once() -> None:
    notes = RankNotes()
    notes.add("group")
    notes.add("skip", "no GPU here")
    assert notes.take() == [("group", ""), ("skip", "no GPU here")]
    assert notes.take() == []
    notes.close()


def test_what_passes_without_the_backend_is_counted_apart(capsys: pytest.CaptureFixture[str]) -> None:
    print_counts([result("a", "pass"), result("b", "pass", groups=0), result("c", "pass", calls=0)])
    assert capsys.readouterr().out.split("\n")[2].split() == ["suite", "3", "0", "0", "1", "1"]


def test_a_comparison_lists_what_passes_elsewhere_only(capsys: pytest.CaptureFixture[str]) -> None:
    there = [result("a", "pass"), result("b", "pass"), result("c", "fail")]
    print_comparison([result("a", "pass"), result("b", "skip", reason="no"), result("c", "fail")], there)
    assert capsys.readouterr().out.split("\n")[1:3] == [
        "1 tests pass there and not here:",
        "  suite b: skip: no",
    ]
