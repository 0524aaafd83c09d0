"""A MASTER_PORT from the user: as under torchrun, the workers can use it in every round."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from contextlib import suppress

import pytest
from tests.ports import free_port
from tests.ranks.launcher.test_launcher import Launcher, end

HOST = "127.0.0.1"
SHOW = "print('master', os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'], flush=True)\n"
# In each round another way to use it.
USE = """
import torch
import torch.distributed as dist

host, port, size = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt == 0:
    dist.init_process_group("gloo", init_method="env://")
    total = torch.ones(1)
    dist.all_reduce(total)
    print("gloo", int(total), flush=True)
    if rank: sys.exit(3)
    time.sleep(600)
store = dist.TCPStore(host, port, size, is_master=rank == 0)  # waits for all
store.add("all", 1)
while rank == 0 and store.add("all", 0) < size: time.sleep(0.01)
print("store", size, flush=True)
"""


def port_with_its_neighbour() -> int:
    """Return a free port; the rendezvous' port, 10,000 below, is free, too."""
    while True:
        port = free_port(HOST)
        with suppress(OSError), socket.create_server((HOST, port - 10_000)):
            return port


def static(port: int, node: int, *words: str) -> list[str]:
    place = ["--master-addr", HOST, "--master-port", str(port)]
    return ["--nnodes", "2", "--node-rank", str(node), *place, *words]


def masters(text: str) -> list[str]:
    return [line[line.index("master") :] for line in text.splitlines() if "master" in line]


@pytest.mark.slow
def test_torch_meets_at_the_given_port(launcher: Launcher) -> None:
    pytest.importorskip("torch")
    port = port_with_its_neighbour()
    launcher.script(SHOW + USE)
    agents = [launcher.start(*static(port, node, "--max-restarts", "1"), "script.py") for node in (0, 1)]
    for code, out, err in map(end, agents):
        assert code == 0, err
        assert masters(out) == [f"master {HOST} {port}"] * 2
        assert re.findall("(gloo|store) 2", out) == ["gloo", "store"]


@pytest.mark.slow
def test_the_same_as_under_torchrun(launcher: Launcher) -> None:
    pytest.importorskip("torch")
    launcher.script(SHOW)
    addressed = "--master-addr={host} --master-port={port}"
    meeting = "--rdzv-backend=static --rdzv-endpoint={host}:{port}"
    for program, nodes, form in (
        ("torch.distributed.run", 2, addressed),
        ("ronde run", 2, addressed),
        ("ronde run", 2, meeting),
        ("ronde run", 1, meeting),
    ):
        port = free_port(HOST)
        place = form.format(host=HOST, port=port)
        agents = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    *f"{program} --nnodes={nodes} {place} --node-rank={node}".split(),
                    "script.py",
                ],
                cwd=launcher.folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for node in range(nodes)
        ]
        launcher.started += agents
        for code, out, err in map(end, agents):
            assert (code, masters(out)) == (0, [f"master {HOST} {port}"]), (program, nodes, form, err)


def test_one_machine(launcher: Launcher) -> None:
    port = free_port(HOST)
    launcher.script(SHOW + f"__import__('socket').create_server(('{HOST}', {port}))")
    code, out, err = launcher.run("--standalone", "--master-port", str(port), "script.py")
    assert (code, masters(out)) == (0, [f"master {HOST} {port}"]), err


@pytest.mark.parametrize("options", ["--standalone", "--nnodes 2 --node-rank 0 --master-addr 127.0.0.1"])
def test_a_given_port_that_is_in_use(launcher: Launcher, options: str) -> None:
    launcher.script("print('it runs')")
    with socket.create_server((HOST, 0)) as stranger:
        port = stranger.getsockname()[1]
        code, out, err = launcher.run(*options.split(), "--master-port", str(port), "script.py")
    assert (code, out) == (2, "")
    assert err == (
        f"ronde run: cannot serve at tcp:{HOST}:{port}: Address already in use; end the process that uses it or "
        "choose another address\n"
    )


def test_where_the_nodes_meet_is_taken(launcher: Launcher) -> None:
    """The rendezvous' port follows from the given one, which the error names, too."""
    launcher.script("print('it runs')")
    port = port_with_its_neighbour()
    taken = port - 10_000
    with socket.create_server((HOST, taken)):
        code, _, err = launcher.run(*static(port, 0), "script.py")
    assert code == 2
    assert f"cannot serve at tcp:{HOST}:{taken}: Address already in use" in err
    assert f"(the port at which nodes meet if their workers use port {port})" in err
