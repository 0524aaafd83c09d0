"""A communicator that cannot be made lets go of what it was given."""

from __future__ import annotations

import os
import socket

import pytest

from ronde import _native


def test_a_key_of_the_wrong_length_leaves_no_descriptor_open() -> None:
    ends = [end for _ in range(3) for end in socket.socketpair()]
    segment, *bells = (os.memfd_create("memory") for _ in range(3))
    given = [segment, *bells, *(end.detach() for end in ends[::2])]
    keys = (bytes(32), bytes(32), False)
    try:
        with pytest.raises(ValueError, match="32 bytes"):
            _native.connect(
                rank=0,
                hosts=["a", "b"],
                host_of=[0, 1],
                cores=1,
                segment=segment,
                bells=bells,
                controls={1: (given[3], bytes(32), bytes(31), False)},
                data={1: [(given[4], *keys), (given[5], *keys)]},
                allreduce_algorithm=0,
                switch_over=[None, None, None],
                staging_bytes=1 << 20,
                timeout_ns=0,
                spin_us=0,
                adasum_hierarchical=False,
                hierarchical_allgather=False,
                seals_payload=False,
                twin=None,
            )
        assert [fd for fd in given if os.path.exists(f"/proc/self/fd/{fd}")] == []
    finally:
        for end in ends[1::2]:
            end.close()
