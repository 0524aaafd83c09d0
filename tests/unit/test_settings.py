from __future__ import annotations

import dataclasses
import logging
import os
import pickle
from typing import Any

import pytest

from ronde.errors import UsageError
from ronde.settings import JobKey, Settings, environment, ignored_horovod_variables, resolve

SECOND = 10**9


def test_without_variables_all_settings_have_their_defaults() -> None:
    assert resolve({}) == Settings()
    assert resolve({"PATH": "/bin", "RONDE_TIMEOUT": " "}) == Settings()


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("RONDE_STORE", "tcp:[::1]:80", "store", "tcp:[::1]:80"),
        ("RONDE_TRANSPORT", "TCP", "transport", "tcp"),
        ("RONDE_TCP_STREAMS", " 4 ", "tcp_streams", 4),
        ("RONDE_INTERFACE", "eth0", "interface", "eth0"),
        ("RONDE_HOST_ID", "pod 7", "host_id", "pod 7"),
        ("RONDE_ADASUM_HIERARCHICAL", "On", "adasum_hierarchical", True),
        ("RONDE_ADASUM_HIERARCHICAL", "0", "adasum_hierarchical", False),
        ("RONDE_ALLREDUCE_ALGORITHM", "ring", "allreduce_algorithm", "ring"),
        ("RONDE_START_TIMEOUT", "0.25", "start_timeout_ns", SECOND // 4),
        ("RONDE_TIMELINE", "traces/", "timeline", "traces/"),
        ("HOROVOD_TIMELINE", "/tmp/t.json", "timeline", "/tmp/t.json"),
        ("RONDE_TIMELINE_MARK_CYCLES", "Yes", "timeline_mark_cycles", True),
        ("HOROVOD_TIMELINE_MARK_CYCLES", "0", "timeline_mark_cycles", False),
        ("RONDE_TIMEOUT", "0", "timeout_ns", 0),
        ("RONDE_TIMEOUT", "12", "timeout_ns", 12 * SECOND),
        ("RONDE_PEER_TIMEOUT", "1", "peer_timeout_ns", SECOND),
        ("RONDE_SPIN", "-1", "spin_us", -1),
        ("RONDE_STAGING_BYTES", "8192", "staging_bytes", 8192),
        ("RONDE_STAGING_BYTES", "512KiB", "staging_bytes", 512 * 1024),
        ("RONDE_STAGING_BYTES", "1 mib", "staging_bytes", 1024 * 1024),
        ("RONDE_LOG_LEVEL", "Debug", "log_level", "debug"),
        ("RONDE_LOG_LEVEL", "FATAL", "log_level", "critical"),
        ("HOROVOD_LOG_LEVEL", "trace", "log_level", "debug"),
        ("HOROVOD_LOG_LEVEL", "WARN", "log_level", "warning"),
        ("HOROVOD_LOG_LEVEL", "3", "log_level", "warning"),  # as Horovod takes what it does not know
        ("RONDE_LOG_LEVEL", "warn", "log_level", "warning"),
        ("HOROVOD_HIERARCHICAL_ALLREDUCE", "1", "hierarchical_bytes", 0),
        ("HOROVOD_HIERARCHICAL_ALLREDUCE", "0", "hierarchical_bytes", 2**31),
        ("HOROVOD_CYCLE_TIME", "3.5", "linger_ns", 3_500_000),
        ("HOROVOD_CYCLE_TIME", "5000", "linger_ns", SECOND),
        ("HOROVOD_LOG_HIDE_TIME", "1", "log_hide_time", True),
        ("RONDE_LOG_HIDE_TIME", "False", "log_hide_time", False),
        ("HOROVOD_GLOO_IFACE", "eth0", "interface", "eth0"),
        ("HOROVOD_START_TIMEOUT", "30", "start_timeout_ns", 30 * SECOND),
        ("RONDE_THREAD_AFFINITY", "3, 1", "thread_affinity", (3, 1)),
        ("HOROVOD_THREAD_AFFINITY", "0", "thread_affinity", (0,)),
    ],
)
def test_variables(variable: str, text: str, field: str, value: object) -> None:
    assert getattr(resolve({variable: text}), field) == value


@pytest.mark.parametrize(
    ("variable", "text", "right"),
    [
        ("RONDE_STORE", "localhost:80", "an address like unix:@name"),
        ("RONDE_TRANSPORT", "rdma", "auto or tcp"),
        ("RONDE_HOST_ID", "h" * 257, "a text of at most 256 characters"),
        ("RONDE_TCP_STREAMS", "0", "a whole number from 1 to 64"),
        ("RONDE_TCP_STREAMS", "two", "a whole number from 1 to 64"),
        ("RONDE_ALLREDUCE_ALGORITHM", "tree", "auto, direct, ring, doubling or hierarchical"),
        ("RONDE_ADASUM_HIERARCHICAL", "maybe", "1 or 0, true or false, yes or no, on or off"),
        ("RONDE_START_TIMEOUT", "0", "a number of seconds above 0"),
        ("RONDE_START_TIMEOUT", "5m", "a number of seconds above 0"),
        ("RONDE_TIMELINE_MARK_CYCLES", "maybe", "1 or 0, true or false, yes or no, on or off"),
        ("RONDE_TIMEOUT", "-1", "a number of seconds above 0, or 0 for no limit"),
        ("RONDE_TIMEOUT", "nan", "a number of seconds above 0, or 0 for no limit"),
        ("RONDE_PEER_TIMEOUT", "0.5", "a number of seconds from 1 to 86400"),
        ("RONDE_SPIN", "-2", "a whole number of microseconds"),
        ("RONDE_STAGING_BYTES", "256KB", "a multiple of 4 KiB"),
        ("RONDE_STAGING_BYTES", "1TiB", "a multiple of 4 KiB"),
        ("RONDE_LOG_LEVEL", "loud", "debug, info, warning, error or critical"),
        ("RONDE_LOG_HIDE_TIME", "2", "1 or 0, true or false, yes or no, on or off"),
        ("RONDE_THREAD_AFFINITY", "0-3", "the numbers of cores, one for each rank of a host"),
        ("HOROVOD_THREAD_AFFINITY", "-1", "the numbers of cores"),
    ],
)
def test_bad_values_are_named_with_what_would_be_right(variable: str, text: str, right: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve({variable: text})
    assert str(caught.value).startswith(f"{variable}={text!r} is invalid: expected {right}")


def test_arguments_go_before_variables() -> None:
    settings = resolve({"RONDE_TCP_STREAMS": "3", "RONDE_TIMEOUT": "nonsense"}, tcp_streams=5, timeout_ns=1)
    assert settings.tcp_streams == 5
    assert settings.timeout_ns == 1
    assert resolve({"RONDE_TCP_STREAMS": "3"}, tcp_streams=None).tcp_streams == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tcp_streams": 0}, "tcp_streams=0 is invalid: expected a whole number from 1 to 64"),
        ({"tcp_streams": True}, "tcp_streams=True is invalid: expected a whole number from 1 to 64"),
        ({"timeout_ns": 1.5}, "timeout_ns=1.5 is invalid: .* given in nanoseconds"),
        ({"tcp_stream": 1}, "unknown setting 'tcp_stream'; did you mean tcp_streams?"),
        ({"job_key": "secret"}, r"job_key=\(a value that is not shown\) is invalid"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve({}, **arguments)


def test_horovods_variables_of_the_same_meaning_count_too() -> None:
    theirs = {"HOROVOD_CACHE_CAPACITY": "7", "HOROVOD_FUSION_THRESHOLD": "1024"}
    assert (resolve(theirs).cache_capacity, resolve(theirs).fusion_bytes) == (7, 1024)
    assert resolve({**theirs, "RONDE_CACHE_CAPACITY": "8"}).cache_capacity == 8


def test_what_means_nothing_of_horovods_variables() -> None:
    environ = {
        "HOROVOD_TORUS_ALLREDUCE": "1",
        "HOROVOD_RANK": "1",
        "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_HOSTNAME": "node1",
        "HOROVOD_EMPTY": " ",
    }
    assert ignored_horovod_variables(
        {**environ, "HOROVOD_LOG_LEVEL": "info", "HOROVOD_WHATEVER": "1", "RONDE_X": "1"}
    ) == [
        "HOROVOD_TORUS_ALLREDUCE",
        "HOROVOD_WHATEVER",
    ]


def test_horovods_switch_for_the_inspection_of_stalls() -> None:
    times = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "5", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "7"}
    assert resolve(times).stall_warning_ns == 5 * 10**9
    assert resolve(times).stall_shutdown_ns == 7 * 10**9
    assert resolve(times | {"HOROVOD_STALL_CHECK_DISABLE": "1"}).stall_warning_ns == 0
    assert resolve(times | {"HOROVOD_STALL_CHECK_DISABLE": "0"}).stall_warning_ns == 5 * 10**9
    assert (
        resolve({"HOROVOD_STALL_CHECK_DISABLE": "1", "RONDE_STALL_WARNING": "3"}).stall_warning_ns
        == 3 * 10**9
    )


def test_an_unknown_variable_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ronde"):
        resolve({"RONDE_TIMEOUTS": "5", "RONDE_QQQQ": "1", "OTHER": "2"})
    assert caplog.messages == [
        "RONDE_QQQQ is set, but Ronde has no such setting",
        "RONDE_TIMEOUTS is set, but Ronde has no such setting; did you mean RONDE_TIMEOUT?",
    ]


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().transport = "tcp"  # type: ignore[misc]


def test_environment_is_a_copy() -> None:
    copy = environment()
    assert copy == dict(os.environ)
    copy["RONDE_STORE"] = "unix:@nowhere"
    assert os.environ.get("RONDE_STORE") != "unix:@nowhere"


def test_a_job_key_survives_hex_and_shows_nothing() -> None:
    key = JobKey.generate()
    again = JobKey.from_hex(key.hex())
    assert key == again
    assert hash(key) == hash(again)
    assert key != JobKey.generate()
    assert key != key.hex()
    settings = resolve({"RONDE_JOB_KEY": key.hex()})
    assert settings.job_key == key
    for text in (repr(key), str(key), f"{key}", repr(settings)):
        assert key.hex()[:8] not in text
    assert pickle.loads(pickle.dumps(key)) == key


@pytest.mark.parametrize("text", ["", "12", "g" * 64, "a" * 63, "ab" * 33, "0x" + "a" * 62])
def test_a_bad_job_key_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(UsageError, match="64 hexadecimal digits") as caught:
        JobKey.from_hex(text)
    assert not text or text not in str(caught.value)
    if text:
        with pytest.raises(UsageError, match=r"RONDE_JOB_KEY=\(a value that is not shown\)") as caught:
            resolve({"RONDE_JOB_KEY": text})
        assert f"'{text}'" not in str(caught.value)


def test_hmac_depends_on_key_parts_and_their_borders() -> None:
    key = JobKey.derived_from("job 1")
    macs = {
        key.hmac(b"ab", b"c"),
        key.hmac(b"a", b"bc"),
        key.hmac(b"abc"),
        JobKey.derived_from("job 2").hmac(b"ab", b"c"),
    }
    assert len(macs) == 4
    assert {len(mac) for mac in macs} == {32}
    assert key.hmac(b"ab", b"c") == JobKey.derived_from("job 1").hmac(b"ab", b"c")


def test_every_setting_has_its_own_variable_and_help() -> None:
    fields = [field for field in dataclasses.fields(Settings) if field.metadata]
    variables = [field.metadata["variable"] for field in fields]
    assert len(set(variables)) == len(variables)
    for field in fields:
        assert field.metadata["variable"].startswith("RONDE_")
        assert field.metadata["help"].endswith(".")
