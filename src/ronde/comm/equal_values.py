"""Requires that all ranks have the same values. The error names the value, and those of two ranks that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ronde.comm.byte_exchange import Exchange
from ronde.errors import MismatchError
from ronde.typed_json import TypedJson

__all__ = ["as_texts", "check_equal", "require_equal"]

_TEXTS: TypedJson[Mapping[str, str]] = TypedJson(Mapping[str, str], "list of values")


def require_equal(exchange: Exchange, values: Mapping[str, object]) -> None:
    """Compare the values with those of the other ranks, which all call it. Raises MismatchError on all of them."""
    check_equal([_TEXTS.decode(told) for told in exchange(_TEXTS.encode(as_texts(values)))])


def as_texts(values: Mapping[str, object]) -> dict[str, str]:
    """Return the values as texts, which are compared and shown."""
    return {name: repr(value) for name, value in values.items()}


def check_equal(told: Sequence[Mapping[str, str]]) -> None:
    """Raise MismatchError unless all ranks have the values of rank 0. `told`: what `as_texts` returned, by rank."""
    for rank, texts in enumerate(told):
        for name, text in told[0].items():
            if texts.get(name) != text:
                raise MismatchError(
                    f"{name} is {text} on rank 0 and {texts.get(name)} on rank {rank}: it must be the same on all ranks"
                )
