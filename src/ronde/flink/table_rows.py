"""Runs tasks where the rows of a table are, and hands these to the workers of the tasks.

A function of Arrow batches packs each batch into one element, so only these pass between operators. An element goes to
the subtask with the same number as that of the packing operator. The subtask appends the rows to a file, and runs its
task when the table has ended, which it learns from a timer at the end of event time. Each subtask also gets an
announcement, because timers belong to elements. No row passes through the program.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pyflink.common import Types
from pyflink.datastream import KeyedProcessFunction, KeySelector, RuntimeContext, StreamExecutionEnvironment
from pyflink.java_gateway import get_gateway
from pyflink.table import DataTypes, StreamTableEnvironment, Table
from pyflink.table.expressions import col
from pyflink.table.types import ArrayType, BooleanType, NumericType, to_arrow_type
from pyflink.table.udf import ScalarFunction, udf
from pyflink.util.exceptions import JavaException
from pyflink.util.java_utils import is_instance_of

from ronde.errors import UsageError
from ronde.launch.clusters.cluster import Ticket
from ronde.launch.clusters.platforms import RowsFile
from ronde.launch.driver.task import run_task

__all__ = ["add_slots", "check_columns", "check_streams", "column_names", "environment_of", "numeric_columns"]

STREAM_TABLES = "org.apache.flink.table.api.bridge.java.StreamTableEnvironment"
LONGEST_ANNOUNCEMENT = 16  # bytes; a stream of Arrow is longer
END_OF_TIME = 2**63 - 1
KEYS_TO_TRY = 1 << 20


def column_names(table: Table) -> list[str]:
    """Return the names of all columns."""
    return list(table.get_resolved_schema().get_column_names())


def numeric_columns(table: Table) -> list[str]:
    """Return the names of the columns of single numbers."""
    return [name for name, kind in _types(table).items() if isinstance(kind, NumericType | BooleanType)]


def check_columns(table: Table, names: Sequence[str]) -> None:
    """Raise UsageError if a column holds no numbers."""
    types = _types(table)
    for name in names:
        kind = types[name]
        while isinstance(kind, ArrayType):
            kind = kind.element_type
        if not isinstance(kind, NumericType | BooleanType):
            raise UsageError(
                f"column {name!r} has the type {types[name]}: expected numbers or arrays of numbers"
            )


def check_streams(table: Table) -> None:
    """Raise UsageError if the environment of the table makes no streams."""
    if not is_instance_of(table._t_env._j_tenv, STREAM_TABLES):
        raise UsageError(
            "the environment of the table makes no streams: create it by StreamTableEnvironment.create(environment), "
            "with a StreamExecutionEnvironment"
        )


def _types(table: Table) -> dict[str, Any]:
    schema = table.get_resolved_schema()
    return dict(zip(schema.get_column_names(), schema.get_column_data_types()))


def environment_of(table: Table) -> StreamExecutionEnvironment:
    """Return the environment in which the jobs of the table run."""
    return StreamExecutionEnvironment(table._t_env._j_tenv.execEnv())


def add_slots(table: Table, columns: Sequence[str], tickets: Sequence[Ticket]) -> None:
    """Add operators to the table's environment: as many subtasks as tickets, which run tasks with rows of the table.

    The parallelism of the environment is the number of tickets. Raises UsageError if Flink does not take the table.
    """
    # Flink plans a query only in a Java thread that has made an environment, and each call may be in another thread.
    StreamTableEnvironment.create(environment_of(table))
    keys, most = _keys_of_subtasks(len(tickets))
    types = _types(table)
    schema = [(name, to_arrow_type(types[name])) for name in columns]
    pack = udf(PackRows(schema), result_type=DataTypes.BYTES(), func_type="pandas")
    packed = table.select(pack(*map(col, columns)).alias("packed")).filter(col("packed").is_not_null)
    announced = table._t_env.from_elements(
        [(bytearray(f"{number}".encode()),) for number in range(len(tickets))],
        DataTypes.ROW([DataTypes.FIELD("packed", DataTypes.BYTES())]),
    )
    try:
        stream = table._t_env.to_data_stream(announced.union_all(packed))
    except JavaException as error:
        raise UsageError(
            f"Flink does not read the table as rows: {str(error).splitlines()[0]}; if later rows replace earlier ones, "
            "set the runtime mode of its environment to BATCH"
        ) from None
    keyed = stream.key_by(SubtaskKeys(keys), key_type=Types.INT())
    slots = keyed.process(TableSlotFunction(tickets), Types.INT())
    slots.set_parallelism(len(tickets)).set_max_parallelism(most).name("agent")


def _keys_of_subtasks(count: int) -> tuple[list[int], int]:
    """Return a key for each subtask, whose elements Flink sends there, and the largest parallelism, which matters."""
    java = get_gateway().jvm
    assignment = java.org.apache.flink.runtime.state.KeyGroupRangeAssignment
    most = assignment.computeDefaultMaxParallelism(count)
    keys: dict[int, int] = {}
    for key in range(KEYS_TO_TRY):
        row = java.org.apache.flink.types.Row(1)
        row.setField(0, key)
        keys.setdefault(assignment.assignKeyToParallelOperator(row, most, count), key)
        if len(keys) == count:
            break
    return [keys[number] for number in range(count)], most


class PackRows(ScalarFunction):  # type: ignore[misc]  # PyFlink has no types
    """Packs a batch of rows into the result for its first row; the others get none."""

    def __init__(self, schema: Sequence[tuple[str, Any]]) -> None:
        self._schema = list(
            schema
        )  # names and Arrow types: in pandas, integers with missing values are floats

    def is_deterministic(self) -> bool:
        """Return False: otherwise Flink might pack rows first, and filter them afterwards."""
        return False

    def eval(self, *columns: Any) -> Any:
        """Return a series of the length of the columns."""
        import pandas
        import pyarrow

        schema = pyarrow.schema(self._schema)
        arrays = [pyarrow.Array.from_pandas(column, type=kind) for column, kind in zip(columns, schema.types)]
        batch = pyarrow.record_batch(arrays, schema=schema)
        sink = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        return pandas.Series([sink.getvalue().to_pybytes(), *[None] * (len(batch) - 1)], dtype=object)


class SubtaskKeys(KeySelector):  # type: ignore[misc]
    """The key of the subtask that gets an element: the one with this number, or the announced one."""

    def __init__(self, keys: Sequence[int]) -> None:
        self._keys = list(keys)

    def open(self, runtime_context: RuntimeContext) -> None:
        """Note which subtask this is."""
        self._own = self._keys[runtime_context.get_index_of_this_subtask() % len(self._keys)]

    def get_key(self, value: Any) -> int:
        """Return the key."""
        packed = value[0]
        return self._keys[int(packed)] if len(packed) <= LONGEST_ANNOUNCEMENT else self._own


class TableSlotFunction(KeyedProcessFunction):  # type: ignore[misc]
    """Collects rows, and then blocks in `run_task`. Each subtask takes the ticket of its index."""

    def __init__(self, tickets: Sequence[Ticket]) -> None:
        self._tickets = tickets

    def open(self, runtime_context: RuntimeContext) -> None:
        """Note which subtask this is, and in which attempt."""
        self._ticket = self._tickets[runtime_context.get_index_of_this_subtask()]
        self._attempt = runtime_context.get_attempt_number()
        self._rows = RowsFile()

    def process_element(self, value: Any, ctx: KeyedProcessFunction.Context) -> Iterator[Any]:
        """Write rows into the file. It emits nothing."""
        import pyarrow

        packed = value[0]
        ctx.timer_service().register_event_time_timer(END_OF_TIME)  # the same one, however often
        if len(packed) > LONGEST_ANNOUNCEMENT:
            for batch in pyarrow.ipc.open_stream(packed):
                self._rows.write(batch)
        return iter(())

    def on_timer(self, timestamp: int, ctx: KeyedProcessFunction.OnTimerContext) -> Iterator[Any]:
        """Run the task. It emits nothing."""
        with self._rows:
            run_task(self._ticket, self._attempt, variables=self._rows.finish())
        return iter(())
