"""The user's configuration of a rendezvous, and the rules that follow from it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ronde.rendezvous.membership import Rules
from ronde.rendezvous.rendezvous import RendezvousConfig

BY_BACKEND = {"places_are_given", "rehost"}


def test_all_rules_that_no_backend_decides_follow_from_the_configuration() -> None:
    names = [field.name for field in fields(Rules) if field.name not in BY_BACKEND]
    values: dict[str, Any] = {name: number for number, name in enumerate(names, 2)}
    rules = RendezvousConfig(**values).rules()
    assert [getattr(rules, name) for name in names] == list(range(2, 2 + len(names)))
