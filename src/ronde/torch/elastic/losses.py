"""Which errors of torch.distributed mean that a rank was lost. Pure.

PyTorch's C++ code turns errors into RuntimeErrors, so the text has to tell. The patterns are those of Ronde in DDP's
backward pass, of Gloo, of NCCL, and of PyTorch's store.
"""

from __future__ import annotations

import re

from ronde.errors import AbortedError, PeerError, PeerLostError, RemoteError, TimeoutError

__all__ = ["is_peer_loss"]

_RONDE = "|".join(error.__name__ for error in (PeerLostError, AbortedError, RemoteError, TimeoutError))
_LOSS = re.compile(
    rf"\b({_RONDE}): "  # in a callback of DDP
    r"|\bgloo\b.*(closed by peer|reset by peer|broken pipe|timed out|read error|write error|connection refused)"
    r"|\bgloo\b.*\b(abort|closed)"
    r"|application timeout caused pair closure"
    r"|process group.*\babort|\bbackend\b.*\baborted"
    r"|nccl.*(remote process exited|remote error|aborted|communicator was aborted|timed out)"
    r"|tcpstore.*(reset by peer|broken pipe|connection refused|failed to recv|closed)"
    r"|(failed to (recv|send)|recvvalue|sendbytes|recvbytes).*(peer|broken pipe|connection)",
    re.IGNORECASE | re.DOTALL,
)
_OF_DISTRIBUTED = ("DistBackendError", "DistNetworkError", "DistStoreError", "DistError", "RuntimeError")


def is_peer_loss(error: BaseException) -> bool:
    """Return whether an exception, or one that caused it, means that another rank was lost.

    True for each PeerError, and for errors of torch.distributed with the words of a lost connection.
    """
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        if isinstance(found, PeerError):
            return True
        if (
            isinstance(found, RuntimeError)
            and type(found).__name__ in _OF_DISTRIBUTED
            and _LOSS.search(str(found))
        ):
            return True
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return False
