"""A `LaunchConfig` as JSON text, on its way to the agent of another host.

The types of the fields say how to read it back, so there is no second list of them here. Nothing but the classes of
`launch/config` comes out of a text, whoever wrote it.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from ronde.errors import UsageError
from ronde.launch.config import LaunchConfig

__all__ = ["config_from_text", "config_to_text"]


def config_to_text(config: LaunchConfig) -> str:
    """Return the configuration as one line."""
    return json.dumps(_plain(config))


def config_from_text(text: str) -> LaunchConfig:
    """Return what `config_to_text` wrote. Raises UsageError if it is not from the same version of Ronde."""
    try:
        config = _value(LaunchConfig, json.loads(text))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"this is no launch configuration of this version of Ronde: {error!r}") from None
    assert isinstance(config, LaunchConfig)
    return config


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return [[_plain(key), _plain(item)] for key, item in value.items()]
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _value(kind: Any, plain: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if plain is None:
            return None
        (kind,) = (argument for argument in arguments if argument is not type(None))
        return _value(kind, plain)
    if origin is Mapping:
        return {_value(arguments[0], key): _value(arguments[1], item) for key, item in plain}
    if origin is frozenset:
        return frozenset(_value(arguments[0], item) for item in plain)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return tuple(_value(arguments[0], item) for item in plain)
        return tuple(_value(argument, item) for argument, item in zip(arguments, plain, strict=True))
    if isinstance(kind, type) and is_dataclass(kind):
        types_by_name = typing.get_type_hints(kind)
        return kind(**{name: _value(types_by_name[name], item) for name, item in plain.items()})
    if issubclass(kind, Enum):
        return kind(plain)
    if type(plain) is not kind:
        raise TypeError(f"{plain!r} is not {kind.__name__}")
    return plain
