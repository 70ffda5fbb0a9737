import json

import pytest

from deepspeed_mcrdl.errors import ConfigError
from deepspeed_mcrdl.tuning.plan import Cell, coarse_first, from_record, grid


def test_a_dtype_is_measured_once_for_each_class_that_it_stands_for():
    cells = grid(["1x2/1"], ["all_reduce", "broadcast", "barrier"], ["float32", "float64", "bfloat16"], [256, 1024])
    lines = [(cell.name, cell.dtype, cell.size) for cell in cells]
    assert lines == [
        ("all_reduce", "float32", 256),
        ("all_reduce", "float32", 1024),
        ("all_reduce", "bfloat16", 256),
        ("all_reduce", "bfloat16", 1024),
        ("broadcast", "float32", 256),
        ("broadcast", "float32", 1024),
        ("barrier", "float32", 0),
    ]


def test_the_ends_of_every_line_come_before_what_lies_between():
    sizes = [4**n for n in range(4, 13)]
    cells = grid(["1x2/1"], ["all_reduce", "broadcast"], ["float32"], sizes)
    order = coarse_first(cells)
    assert sorted(order, key=str) == sorted(cells, key=str)
    assert {cell.size for cell in order[:4]} == {sizes[0], sizes[-1]}
    assert {cell.size for cell in order[4:6]} == {sizes[4]}
    assert {cell.name for cell in order[:2]} | {cell.name for cell in order[4:6]} == {"all_reduce", "broadcast"}


def record(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_jobs_calls_become_cells_weighted_by_how_often_they_were_made(tmp_path):
    row = {"operation": "all_reduce", "dtype": "float32", "mesh": "1x2/1", "bytes": 1000, "calls": 7}
    cells = from_record(
        record(
            tmp_path / "calls.jsonl",
            row,
            row | {"bytes": 1100, "calls": 3},
            row | {"operation": "send", "bytes": 64},
            row | {"operation": "recv", "bytes": 64},
            row | {"operation": "barrier", "dtype": None, "bytes": 0},
            row | {"mesh": "1x1/1"},  # a group of one rank: nothing to choose
        )
    )
    assert cells == {
        Cell("1x2/1", "all_reduce", "float32", 1024): 10,
        Cell("1x2/1", "send_recv", "float32", 64): 14,
        Cell("1x2/1", "barrier", "float32", 0): 7,
    }


@pytest.mark.parametrize("text", ["", "{", '{"operation": "all_reduce"}\n'])
def test_what_is_no_record_is_said(tmp_path, text):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"x\.jsonl"):
        from_record(path)
    with pytest.raises(ConfigError, match=r"no\.jsonl is not a record"):
        from_record(tmp_path / "no.jsonl")
