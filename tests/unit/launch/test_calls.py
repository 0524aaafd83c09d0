"""What keeps a call from being sent to workers is named."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from ronde.errors import UsageError
from ronde.launch.calls import describe_unsendable, pack_call

pytest.importorskip("cloudpickle", reason="cloudpickle is not installed here")

LOCK = threading.Lock()


class Trainer:
    """Has an attribute that cannot be pickled."""

    def __init__(self) -> None:
        self.options = {"lock": LOCK}

    def train(self) -> None:
        pass


def with_variable() -> Callable[[], Any]:
    lock = LOCK
    return lambda: [lock for _ in range(2)]


def within_another_function() -> Callable[[], Any]:
    inner = with_variable()
    return lambda: [inner()]


def with_default() -> Callable[..., Any]:
    return lambda size=3, lock=LOCK: (size, lock)


class DataFrame:
    """Stands for that of Spark, which has a connection to its JVM."""

    __module__ = "pyspark.sql.dataframe"

    def __init__(self) -> None:
        self.lock = LOCK


def with_frame() -> Callable[[], Any]:
    clicks = DataFrame()
    return lambda: clicks


@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "expected"),
    [
        (
            print,
            (1, LOCK),
            {},
            r"TypeError: cannot pickle .*; argument 2 is of type _thread\.lock: create it in",
        ),
        (print, (), {"x": [1, LOCK]}, "item 1 of the argument 'x' is of type"),
        (
            with_variable(),
            (),
            {},
            r"the variable 'lock' of with_variable\.<locals>\.<lambda> is of type _thread",
        ),
        (within_another_function(), (), {}, r"the variable 'lock' of with_variable\.<locals>"),
        (with_default(), (), {}, r"the variable 'lock' of with_default\."),
        (partial(print, LOCK), (), {}, "argument 1 of the function is of type"),
        (
            Trainer().train,
            (),
            {},
            "item 'lock' of the attribute 'options' of the object of the method Trainer.train",
        ),
    ],
)
def test_what_cannot_be_sent_is_named(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], expected: str
) -> None:
    with pytest.raises(UsageError, match=expected):
        pack_call(fn, args, kwargs)


def test_a_data_frame_that_a_function_captures_gets_advice() -> None:
    with pytest.raises(UsageError) as caught:
        pack_call(with_frame(), (), {})
    assert str(caught.value) == (
        "with_frame.<locals>.<lambda> and its arguments cannot be sent to workers: the variable 'clicks' of "
        "with_frame.<locals>.<lambda> is of type pyspark.sql.dataframe.DataFrame, which exists only in this process; "
        "pass the rows as data, as in ronde.comqueue.iterate(step, data=ronde.comqueue.read(clicks), ...), or write "
        "them to files that the function reads"
    )


def test_an_object_that_contains_itself_is_named() -> None:
    loop: list[Any] = [LOCK]
    loop.append(loop)
    with pytest.raises(UsageError, match="item 0 of argument 1 is of type"):
        pack_call(print, (loop,), {})


GENERATOR = (number for number in [1])


class Holder:
    """Has an attribute with the name of a global variable that cannot be sent."""

    LOCK = 1


def with_attribute() -> Any:
    return Holder.LOCK, GENERATOR


def test_names_of_attributes_are_no_variables() -> None:
    with_attribute.__module__ = "__main__"  # so that its variables are sent
    with pytest.raises(
        UsageError, match=r"the variable 'GENERATOR' of with_attribute is of type builtins.generator"
    ):
        pack_call(with_attribute, (), {})


def test_without_cloudpickle_the_variables_of_a_function_do_not_matter() -> None:
    problem = describe_unsendable(ValueError("it is local"), with_variable(), (), {}, pickle.dumps)
    assert problem == "ValueError: it is local"


class Elusive:
    """Raises whatever is read."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"{name} cannot be read")


def test_objects_that_cannot_be_looked_at_leave_the_error_of_pickling() -> None:
    with pytest.raises(
        UsageError, match=r"print and its arguments cannot be sent to workers: .*cannot be read$"
    ):
        pack_call(print, (Elusive(),), {})
