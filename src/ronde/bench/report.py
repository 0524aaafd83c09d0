"""Evaluates the measurements of `ronde bench`: expected times, shares of the limit, recommendations, text. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ronde.bench.collective_traffic import JobShape, usual_algorithm
from ronde.bench.cost_model import Rates, least_seconds, predict

__all__ = ["BenchResults", "CallTime", "SettingTrial", "as_json", "describe", "size_text", "trials_for"]

LEAST_GAIN = 1.15  # a setting must be that much faster, in each turn, to be recommended


@dataclass(frozen=True)
class CallTime:
    """The measured time of one call. `memory_bytes_per_s`: of copies of this size in the same run, in whole lines."""

    operation: str
    nbytes: int
    seconds: float
    memory_bytes_per_s: float
    is_symmetric: bool = False


@dataclass(frozen=True)
class SettingTrial:
    """All-reduces of `nbytes` with another value of a setting, in turns with those without it.

    `variable`: that of the setting. `seconds` and `usual_seconds`: of a call, one for each turn.
    """

    variable: str
    value: int
    nbytes: int
    seconds: tuple[float, ...] = ()
    usual_seconds: tuple[float, ...] = ()

    @property
    def gain(self) -> float:
        """The smallest factor by which the value is faster."""
        return min(self.usual_seconds) / max(self.seconds) if self.seconds else 0.0


@dataclass(frozen=True)
class BenchResults:
    """All measurements. `rates`: those of the machine, with the memory of the largest copies.

    `skipped`: sizes that would have taken too long.
    """

    shape: JobShape
    rates: Rates
    times: tuple[CallTime, ...]
    trials: tuple[SettingTrial, ...] = ()
    skipped: tuple[str, ...] = ()


def trials_for(shape: JobShape, largest: int) -> list[SettingTrial]:
    """Return what is worth a trial on such a job, with arrays of at most `largest` bytes."""
    if shape.hosts == 1:
        large = min(16 << 20, largest)
        return [SettingTrial("RONDE_STAGING_BYTES", value, large) for value in (64 << 10, 1 << 20)]
    large = min(16 << 20, largest)
    small = min(128 << 10, largest)
    streams = [SettingTrial("RONDE_TCP_STREAMS", value, large) for value in (1, 4)]
    return [*streams, SettingTrial("RONDE_DOUBLING_BYTES", 256 << 10, small)]


def size_text(nbytes: int) -> str:
    """Return a size such as 64 KiB."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes} B"


def time_text(seconds: float) -> str:
    """Return a time such as 4.2 us."""
    if seconds >= 0.9995:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 0.9995e-3 else f"{seconds * 1e6:.1f} us"


def as_json(results: BenchResults) -> dict[str, Any]:
    """Return the results as plain values, with the times that the model expects."""
    rates = results.rates
    return {
        "hosts": results.shape.hosts,
        "ranks_per_host": results.shape.ranks_per_host,
        "memory_bytes_per_s": rates.memory_bytes_per_s,
        "exchange_s": rates.exchange_s,
        "link_bytes_per_s": rates.link_bytes_per_s,
        "message_s": rates.message_s,
        "frame_s": rates.frame_s,
        "calls": [_row(results, each) for each in results.times],
        "trials": [
            {
                "variable": each.variable,
                "value": each.value,
                "bytes": each.nbytes,
                "seconds": list(each.seconds),
                "usual_seconds": list(each.usual_seconds),
                "is_recommended": each.gain >= LEAST_GAIN,
            }
            for each in results.trials
        ],
        "skipped": list(results.skipped),
    }


def _row(results: BenchResults, time: CallTime) -> dict[str, Any]:
    rates = Rates(
        time.memory_bytes_per_s,
        results.rates.exchange_s,
        results.rates.link_bytes_per_s,
        results.rates.message_s,
        results.rates.frame_s,
    )
    algorithm = usual_algorithm(time.operation, results.shape, time.nbytes)
    expected = predict(time.operation, algorithm, results.shape, time.nbytes, rates, time.is_symmetric)
    least = least_seconds(time.operation, results.shape, time.nbytes, rates)
    return {
        "operation": time.operation,
        "bytes": time.nbytes,
        "memory": "symmetric" if time.is_symmetric else "private",
        "algorithm": algorithm,
        "seconds": time.seconds,
        "expected_seconds": expected.seconds,
        "share_of_limit": least / time.seconds,
    }


def describe(results: BenchResults) -> str:
    """Return the report."""
    return "\n".join([*_heading(results), "", *_table(results), "", *_advice(results)]) + "\n"


def _heading(results: BenchResults) -> Iterator[str]:
    shape, rates = results.shape, results.rates
    each = f"{shape.hosts} hosts with {shape.ranks_per_host} ranks each" if shape.hosts > 1 else "1 host"
    yield f"{shape.ranks} ranks on {each}" if shape.hosts == 1 else each
    # A copy reads a line, fetches the one that it writes, and writes it.
    yield f"  copies of all ranks of a host: {rates.memory_bytes_per_s / 3e9:.1f} GB/s"
    if shape.ranks_per_host > 1:
        yield f"  ranks of a host meet in {time_text(rates.exchange_s)}"
    if shape.hosts > 1:
        yield f"  between hosts: {rates.link_bytes_per_s / 1e9:.2f} GB/s, a message takes {time_text(rates.message_s)}"


def _table(results: BenchResults) -> Iterator[str]:
    yield f"{'operation':<15}{'size':>9}{'measured':>12}{'expected':>12}{'GB/s':>8}{'of limit':>10}"
    last = ""
    for row in as_json(results)["calls"]:
        name = row["operation"] + (" *" if row["memory"] == "symmetric" else "")
        speed = f"{row['bytes'] / row['seconds'] / 1e9:.2f}" if row["bytes"] >= 1 << 10 else "-"
        shown, last = "" if name == last else name, name
        yield (
            f"{shown:<15}{size_text(row['bytes']):>9}{time_text(row['seconds']):>12}"
            f"{time_text(row['expected_seconds']):>12}{speed:>8}{row['share_of_limit']:>9.0%}"
        )
    yield "* in symmetric memory, from world.empty()"


def _advice(results: BenchResults) -> Iterator[str]:
    if results.skipped:
        yield f"Skipped, because it would take too long (--seconds): {', '.join(results.skipped)}"
    found = [*_faster_memory(results.times), *_faster_settings(results.trials)]
    if found:
        yield from ("Recommended:", *found)
    elif results.trials:
        tried = ", ".join(f"{each.variable}={each.value}" for each in results.trials)
        yield f"No setting to recommend. Not faster: {tried}"
    yield "`ronde doctor` says what holds this machine back."


def _faster_settings(trials: Sequence[SettingTrial]) -> Iterator[str]:
    best: dict[str, SettingTrial] = {}
    for each in trials:
        if each.gain >= LEAST_GAIN and (each.variable not in best or each.gain > best[each.variable].gain):
            best[each.variable] = each
    for each in best.values():
        yield (
            f"  {each.variable}={each.value}: an all-reduce of {size_text(each.nbytes)} took "
            f"{time_text(min(each.seconds))} instead of {time_text(min(each.usual_seconds))}"
        )


def _faster_memory(times: Sequence[CallTime]) -> Iterator[str]:
    private = {(each.operation, each.nbytes): each.seconds for each in times if not each.is_symmetric}
    both = [
        (each, private[each.operation, each.nbytes])
        for each in times
        if each.is_symmetric and (each.operation, each.nbytes) in private
    ]
    if both:
        each, usual = max(both, key=lambda pair: pair[0].nbytes)
        if usual >= LEAST_GAIN * each.seconds:
            yield (
                f"  arrays from world.empty(): an {each.operation} of {size_text(each.nbytes)} took "
                f"{time_text(each.seconds)} instead of {time_text(usual)}"
            )
