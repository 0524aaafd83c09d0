"""Which errors of torch.distributed count as the loss of a rank, and which connections end with its groups."""

from __future__ import annotations

import os
import socket
import weakref

import pytest

pytest.importorskip("torch")

import ronde
from ronde.torch.elastic import process_groups
from ronde.torch.elastic.process_groups import is_peer_loss


@pytest.mark.parametrize(
    "text",
    [
        "Got the following error when running the callback: PeerLostError: rank 1 on vm was lost: it ended",
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:28553.",
        "[.../third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [::1]:28297: Connection reset by peer",
        "[.../gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
        "NCCL error in: ProcessGroupNCCL.cpp:3384, remote process exited or there was a network error",
        "NCCL communicator was aborted on rank 1.",
        "Connection reset by peer",
        "failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash? (peer)",
    ],
)
def test_losses(text: str) -> None:
    assert is_peer_loss(RuntimeError(text))
    wrapped = ValueError("the step failed")
    wrapped.__cause__ = RuntimeError(text)
    assert is_peer_loss(wrapped)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("Detected mismatch between collectives on ranks"),
        ConnectionResetError("[Errno 104] Connection reset by peer"),  # of the program's own connection
        ronde.MismatchError("rank 0 called allreduce, but rank 1 called broadcast"),
        OSError("gloo: Broken pipe"),
    ],
)
def test_other_errors(error: BaseException) -> None:
    assert not is_peer_loss(error)


def test_errors_of_ronde() -> None:
    assert is_peer_loss(ronde.PeerLostError("rank 1 was lost", 1))
    assert is_peer_loss(ronde.AbortedError("rank 1 aborted", 1))


class Object:
    """Of which there are weak references."""


def test_only_tcp_connections_of_native_code_are_taken_for_those_of_groups() -> None:
    before = process_groups._open_sockets()
    dead = weakref.proxy(Object())  # raises if it is asked for its class
    with socket.create_server(("127.0.0.1", 0)) as listener:
        mine = [socket.create_connection(listener.getsockname()) for _ in range(2)]
        theirs = [listener.accept()[0] for _ in mine]
        here, there = socket.socketpair()
        native = [mine.pop(0).detach(), here.detach()]  # as if C++ code had opened them
        process_groups._shut_down_all(process_groups._of_native_code(process_groups._opened_since(before)))
    for each in (*theirs, there):
        each.setblocking(False)
    assert theirs[0].recv(1) == b"", "it has ended"
    for each in (theirs[1], there):
        with pytest.raises(BlockingIOError):
            each.recv(1)
    for each in (*mine, *theirs, there):
        each.close()
    for fd in native:
        os.close(fd)
    del dead
