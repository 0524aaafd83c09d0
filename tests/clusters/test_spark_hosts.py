"""`ronde.spark.run` on a standalone Spark whose hosts have interfaces that do not connect them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.clusters.spark_standalone import DIRECT, GPUS, PORTS, StandaloneSpark

pytest.importorskip("pyspark", reason="PySpark is not installed here")
pytestmark = [pytest.mark.spark, pytest.mark.hosts, pytest.mark.slow]

GROWING = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.minExecutors": "0",
    "spark.dynamicAllocation.initialExecutors": "0",
    "spark.dynamicAllocation.maxExecutors": "2",
    "spark.cores.max": "8",
}
# Otherwise Spark gives both tasks to the first executor if the second one is late.
BOTH_EXECUTORS = {"spark.scheduler.minRegisteredResourcesRatio": "1.0"}


@pytest.fixture(scope="module")
def spark(request: pytest.FixtureRequest) -> Iterator[StandaloneSpark]:
    """Start the cluster of `on`; pytest ends it before it starts the other, as a process has only one set of hosts."""
    with StandaloneSpark(ipv6=request.param == "ipv6") as spark:
        yield spark


def on(network: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("spark", [network], indirect=True)


@on("ipv4")
def test_a_job_grows_from_no_executors_and_outlives_one_and_gets_gpus(
    spark: StandaloneSpark, tmp_path: Path
) -> None:
    executors, places, first_steps, gpus = spark.drive("grows", GROWING, folder=str(tmp_path))
    assert executors == 0
    assert [place[:2] for place in places] == [[0, 2], [1, 2]]
    assert {place[2] for place in places} <= set(DIRECT.values())

    sizes = (tmp_path / "sizes").read_text()
    assert re.fullmatch("1*2+1*2", sizes), "both ranks after the loss, too"
    assert len(first_steps) == 2
    assert first_steps[0] > 0, "training went on where it was"

    assert [place[:2] for place in gpus] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    hosts = [set(place[2].split(",")) for place in gpus]
    assert hosts[0] == hosts[1]
    assert hosts[2] == hosts[3]
    assert sorted(map(sorted, hosts)) == [sorted(GPUS[host]) for host in (1, 1, 2, 2)]


@pytest.mark.skipif(
    shutil.which("nft") is None, reason="needs the command `nft` (Debian: apt install nftables)"
)
@on("ipv4")
def test_the_driver_may_be_behind_a_nat(spark: StandaloneSpark) -> None:
    settings = {"spark.ronde.driver.port": str(PORTS[2]), **BOTH_EXECUTORS}
    places, messages = spark.drive_behind_nat("places", settings)
    assert [place[:2] for place in places] == [[0, 2], [1, 2]]
    assert {place[2] for place in places} <= set(DIRECT.values())
    assert "all 2 tasks have registered" in messages


@on("ipv6")
def test_hosts_with_ipv6_only(spark: StandaloneSpark) -> None:
    places, _ = spark.drive("places", BOTH_EXECUTORS)
    assert [place[:2] for place in places] == [[0, 2], [1, 2]]
    assert {f"[{place[2]}]" for place in places} <= {spark.address(1), spark.address(2)}
