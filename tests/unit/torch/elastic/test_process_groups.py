"""Which errors of torch.distributed count as the loss of a rank."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import ronde
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
