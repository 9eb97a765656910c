"""Rows that tasks and the driver make, on both engines."""

from __future__ import annotations

from support.engines import Engine, on_both_engines

from bkctl.spark.jobs.bookie_records import frame_of, map_rows, rows_in_tasks

SCHEMA = "n bigint, name string"


@on_both_engines
def test_tasks_get_and_give_rows_with_names(engine: Engine) -> None:
    numbers = engine.session.range(0, 5, 1, 2)
    made = map_rows(numbers, lambda batches: ([{"n": row["id"] * 2} for row in rows] for rows in batches), SCHEMA)
    assert sorted((row.n, row.name) for row in made.collect()) == [(number, None) for number in range(0, 10, 2)]


@on_both_engines
def test_each_item_is_the_work_of_a_task(engine: Engine) -> None:
    made = rows_in_tasks(
        engine.session, [(1, "a"), (2, "b")], lambda item: [{"n": item[0], "name": item[1]}] * item[0], SCHEMA
    )
    assert sorted((row.n, row.name) for row in made.collect()) == [(1, "a"), (2, "b"), (2, "b")]


@on_both_engines
def test_rows_of_the_driver_may_lack_columns(engine: Engine) -> None:
    assert [tuple(row) for row in frame_of(engine.session, [{"n": 1}], SCHEMA).collect()] == [(1, None)]
    assert frame_of(engine.session, [], SCHEMA).collect() == []
