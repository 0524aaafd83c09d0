"""A script for Horovod on the two names of this machine, whose list of hosts changes at the end of each epoch."""

from __future__ import annotations

import json

import pytest
from tests.ranks.launcher.test_launcher import HANGING_S, Launcher

pytestmark = pytest.mark.slow

# It waits for each change as Horovod's own tests do, because a job may be faster than the list of its hosts.
PROGRAM = """
import json, os, time
import numpy as np
import ronde, ronde.elastic

lists = ["localhost:1 127.0.0.1:1", "localhost:1", "localhost:1 127.0.0.1:1", "127.0.0.1:1"]
ronde.init()
first_rank = ronde.rank()

@ronde.elastic.run
def train(state):
    while state.epoch < len(lists):
        ronde.allreduce(np.ones(1), name="sum")
        if ronde.rank() == 0:
            place = [os.environ["HOROVOD_HOSTNAME"], first_rank, ronde.size()]
            print(json.dumps({"epoch": state.epoch, "place": place}), flush=True)
            if state.epoch + 1 < len(lists):
                with open("hosts.new", "w") as listed:
                    listed.write("\\n".join(lists[state.epoch + 1].split()))
                os.replace("hosts.new", "hosts")
                while state._host_messages.empty():
                    time.sleep(0.01)
        state.epoch += 1
        state.commit()

train(ronde.elastic.ObjectState(epoch=0))
"""


def test_ranks_go_by_the_list_and_survivors_come_before_newcomers(launcher: Launcher) -> None:
    (launcher.folder / "script.py").write_text(PROGRAM)
    (launcher.folder / "hosts").write_text("localhost:1\n127.0.0.1:1\n")
    find = launcher.folder / "find.sh"
    find.write_text(f"#!/bin/sh\ncat {launcher.folder}/hosts\n")
    find.chmod(0o755)
    options = ("--host-discovery-script", str(find), "-n", "2", "--min-np", "1", "--max-np", "2")
    job = launcher.start(*options, "script.py")
    out, _ = job.communicate(timeout=HANGING_S)
    assert job.returncode == 0
    said = [json.loads(line[line.index("{") :]) for line in out.decode().splitlines() if "{" in line]
    assert [each["place"] for each in said] == [
        ["localhost", 0, 2],
        ["localhost", 0, 1],
        ["localhost", 0, 2],
        ["127.0.0.1", 1, 1],
    ]
