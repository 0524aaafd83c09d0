"""The same as tests/ranks/communicator/test_oracle.py between two hosts with two ranks each: shared memory inside,
TCP across.
"""

from __future__ import annotations

import pytest
from tests.ranks.communicator import oracle

from ronde.testing.hosts import Hosts

EXAMPLES = 60  # per operation


@pytest.mark.parametrize("ipv6", [False, True])
def test_all_operations_agree_with_numpy(ipv6: bool) -> None:
    with Hosts(2, ranks_per_host=2) as two:
        compared = two.run(oracle.agrees_with_numpy, EXAMPLES, ipv6=ipv6)
    assert compared == [EXAMPLES * len(oracle.OPERATIONS)] * 4
