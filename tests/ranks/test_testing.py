"""`ronde.testing.ranks` and `ronde.testing.faults`: what they return, what they raise, and that nobody stays."""

from __future__ import annotations

import os
import select
from pathlib import Path

import pytest
from tests.ranks import programs

from ronde.errors import RemoteError, TimeoutError, UsageError
from ronde.testing import faults, ranks

pytestmark = pytest.mark.fresh_ranks


def test_results_come_in_the_order_of_ranks() -> None:
    assert ranks.run(programs.answer, 3, programs.Question(21)) == [(0, 42), (1, 42), (2, 42)]


def test_ranks_are_told_who_they_are() -> None:
    first, second = ranks.run(programs.environment, 2, environ={"RONDE_TRANSPORT": "tcp"})
    assert (first["RANK"], second["RANK"]) == ("0", "1")
    assert first["WORLD_SIZE"] == first["LOCAL_WORLD_SIZE"] == "2"
    assert first["RONDE_STORE"] == second["RONDE_STORE"]
    assert first["RONDE_JOB_KEY"] == second["RONDE_JOB_KEY"]
    assert first["RONDE_TRANSPORT"] == "tcp"


def test_an_error_names_the_rank_and_shows_its_traceback() -> None:
    with pytest.raises(RemoteError, match="rank 1 of 2 failed:") as caught:
        ranks.run(programs.raise_on_rank_1, 2)
    assert caught.value.rank == 1
    assert "in raise_on_rank_1" in caught.value.traceback_text
    assert "ValueError: the answer is unknown" in caught.value.traceback_text


def test_a_crash_names_the_rank_and_shows_where() -> None:
    with pytest.raises(
        RemoteError, match="rank 1 of 2 failed:\nthe process died of SIGSEGV while it ran"
    ) as caught:
        ranks.run(programs.crash_on_rank_1, 2)
    assert "in crash_on_rank_1" in caught.value.traceback_text


def test_sys_exit_is_a_failure() -> None:
    with pytest.raises(RemoteError, match="SystemExit: 3"):
        ranks.run(programs.exit_with, 1, 3)


def test_a_result_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(RemoteError, match="the result cannot be pickled"):
        ranks.run(programs.no_pickle, 1)


def test_a_timeout_shows_stacks_even_of_a_stopped_rank() -> None:
    with ranks.start(programs.sleep_for_ever, 2) as job:
        assert [job.told(0), job.told(1)] == job.pids
        faults.stop(job.pids[1])
        with pytest.raises(TimeoutError, match=r"ranks 0, 1 are still busy after 0\.2 s") as caught:
            job.results(timeout_s=0.2)
    assert caught.value.missing == (0, 1)
    assert str(caught.value).count("in sleep_for_ever") == 2


def test_outcomes_tell_of_every_rank() -> None:
    with ranks.start(programs.raise_on_rank_1, 2) as job:
        job.told(0)
        faults.kill(job.pids[0])
        killed, raised = job.outcomes()
    assert "the process died of SIGKILL" in str(killed.error)
    assert isinstance(raised.error, ValueError)


def test_a_rank_that_ends_has_nothing_more_to_tell() -> None:
    with ranks.start(programs.exit_with, 1, 0) as job, pytest.raises(RemoteError, match="rank 0 of 1"):
        job.told(0)


def test_what_a_rank_has_started_ends_with_the_job() -> None:
    with ranks.start(programs.leave_a_child_behind, 1) as job:
        end_of_child = os.pidfd_open(job.results()[0])
    assert select.select([end_of_child], [], [], 10)[0]
    os.close(end_of_child)


def test_a_script_runs_as_main(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, pathlib\nif __name__ == '__main__': pathlib.Path(sys.argv[1]).write_text('ran')\n"
    )
    ranks.run(ranks.run_script, 1, str(script), str(tmp_path / "proof"))
    assert (tmp_path / "proof").read_text() == "ran"


def test_a_program_that_starts_ranks_while_it_is_imported_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "endless.py"
    program.write_text("from ronde.testing import ranks\ndef f(): pass\nranks.run(f, 2)\n")
    with pytest.raises(RemoteError, match="if __name__ == '__main__':"):
        ranks.run(ranks.run_script, 1, str(program))


@pytest.mark.parametrize("n", [0, -1])
def test_no_ranks_make_no_sense(n: int) -> None:
    with pytest.raises(UsageError, match=f"the number of ranks must be at least 1, not {n}"):
        ranks.run(os.getpid, n)


def test_a_function_without_a_name_cannot_be_run() -> None:
    with pytest.raises(UsageError, match="cannot be imported by other processes"):
        ranks.run(lambda: None, 1)


def test_tell_is_for_ranks() -> None:
    with pytest.raises(UsageError, match="only in a rank"):
        ranks.tell(1)


def test_copies_of_a_template_have_its_imports_and_are_ranks_like_others() -> None:
    assert "tabnanny" not in ranks.run(programs.parent_and_modules, 1)[0][1]
    with ranks.template("tabnanny") as template, ranks.copies_of(template):
        (parent, modules), other = ranks.run(programs.parent_and_modules, 2)
        assert "tabnanny" in modules
        assert parent == other[0] != os.getpid()
        assert ranks.run(programs.answer, 3, programs.Question(21)) == [(0, 42), (1, 42), (2, 42)]
        with pytest.raises(RemoteError, match="rank 1 of 2 failed:\nthe process died of SIGSEGV") as caught:
            ranks.run(programs.crash_on_rank_1, 2)
        assert "in crash_on_rank_1" in caught.value.traceback_text
        with ranks.start(programs.leave_a_child_behind, 1) as job:
            end_of_child = os.pidfd_open(job.results()[0])
        assert select.select([end_of_child], [], [], 10)[0]
        os.close(end_of_child)
        # The runtime of OpenMP has read this in the template.
        assert (
            "tabnanny"
            not in ranks.run(programs.parent_and_modules, 1, environ={"OMP_NUM_THREADS": "2"})[0][1]
        )
    assert "tabnanny" not in ranks.run(programs.parent_and_modules, 1)[0][1]
