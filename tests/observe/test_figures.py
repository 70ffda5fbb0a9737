import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from deepspeed.comm import comm
from hypothesis import given
from hypothesis import strategies as st

import deepspeed_mcrdl as mcrdl
from deepspeed_mcrdl.config import parse
from deepspeed_mcrdl.errors import CallError, ConfigError
from deepspeed_mcrdl.observe.figures import Cell, bandwidths, bucket_of, middle_ns, percentile_ns, together
from deepspeed_mcrdl.observe.files import LineFile, Writer, lines_of, path_of
from tests import launcher
from tests.observe.programs import calls, observed, unobserved
from tests.programs import face


@given(st.integers(8, 10**13))
def test_a_bucket_tells_a_latency_to_an_eighth(latency_ns):
    assert abs(middle_ns(bucket_of(latency_ns)) - latency_ns) <= latency_ns / 8


@given(st.lists(st.integers(0, 10**13), min_size=1))
def test_many_calls_are_summed_as_one_by_one(latencies):
    fresh, single = Cell(), Cell()
    for latency in latencies:
        fresh.fresh.append((4, latency // 3, latency - latency // 3))
        single.over(4, latency)
    fresh.settle()
    assert (fresh.latencies, fresh.latency_ns) == (single.latencies, single.latency_ns)
    assert (fresh.done_bytes, fresh.calls) == (single.done_bytes, single.done)


@given(st.lists(st.integers(8, 10**9), min_size=1))
def test_percentiles_are_those_of_the_calls(latencies):
    counts = {}
    for latency in latencies:
        counts[bucket_of(latency)] = counts.get(bucket_of(latency), 0) + 1
    for part in (0.01, 0.5, 0.99, 1.0):
        exact = sorted(latencies)[math.ceil(part * len(latencies)) - 1]
        assert abs(percentile_ns(counts, part) - exact) <= exact / 8


def test_what_the_log_says_of_known_calls(ranks, tmp_path):
    results = ranks(3).run(calls, str(tmp_path), {"log": True, "every_steps": 2})
    for rank, rows in enumerate(results):
        found = {(row["operation"], row["up_to"]): row for row in rows}
        assert all(row["backend"] == "mpi" and row["why"] == "routing.default" for row in rows)
        small = found["all_reduce", 1024]  # 1024 and 800 bytes
        assert (small["calls"], small["bytes"], small["done"], small["ranks"]) == (8, 4 * 1824, 8, 3)
        large = found["all_reduce", 2**19]
        assert (large["calls"], large["bytes"], large["done"]) == (4, 1_600_000, 4)
        assert large["latency_ns"] > 4 * 2e6  # the sleep between the call and the wait
        assert large["waited_ns"] < large["latency_ns"]
        assert found["all_gather_into_tensor", 1024]["bytes"] == 4 * 768
        algbw, busbw = bandwidths(large)
        assert algbw == pytest.approx(1_600_000 / large["latency_ns"] * 1e9)
        assert busbw == pytest.approx(algbw * 4 / 3)
        assert sum(calls for _, calls in small["latencies"]) == 8
        assert (("broadcast", 64) in found) == (rank < 2)
        if rank < 2:
            assert (found["broadcast", 64]["ranks"], found["broadcast", 64]["kind"]) == (2, "other")
            assert bandwidths(found["broadcast", 64])[0] == bandwidths(found["broadcast", 64])[1]
        one = together(rows, "operation")
        assert {row["operation"]: row["calls"] for row in one}["all_reduce"] == 12
        lines = [json.loads(line) for line in lines_of(tmp_path, "log", rank)]
        assert [line["kind"] for line in lines] == ["start", "figures", "figures"]
        assert lines[0]["world_size"] == 3
        assert "mpi" in lines[0]["backends"]
        assert [len(line["steps"]) for line in lines[1:]] == [2, 1]  # the first step begins nowhere
        assert all(
            step_ns >= communicated_ns > 0 for line in lines[1:] for step_ns, communicated_ns, _ in line["steps"]
        )
        assert sum(row["calls"] for line in lines[1:] for row in line["rows"]) == sum(row["calls"] for row in rows)


def _epochs(folder):
    cdb = observed(folder, log=True)
    cdb.all_reduce(torch.ones(4))
    mcrdl.log_reset("epoch 1")
    cdb.all_reduce(torch.ones(4))
    cdb.all_reduce(torch.ones(4))
    rows = mcrdl.log_summary()
    unobserved()
    with pytest.raises(CallError, match='add "observe"'):
        mcrdl.log_summary()
    return [row["calls"] for row in rows]


def test_a_log_counts_anew_at_an_epoch(ranks, tmp_path):
    assert ranks(2).run(_epochs, str(tmp_path)) == [[2], [2]]
    lines = [json.loads(line) for line in lines_of(tmp_path, "log", 0)]
    assert [(line["label"], line["rows"][0]["calls"]) for line in lines[1:]] == [("epoch 1", 1), (None, 2)]


def _seen_by_polling(folder):
    cdb = observed(folder, log=True)
    work = cdb.all_reduce(torch.ones(1000), async_op=True)
    while not work.is_completed():
        pass
    assert not cdb.runtime.progress
    work.wait()
    rows = mcrdl.log_summary()
    unobserved()
    return rows[0]["done"], rows[0]["calls"]


def test_a_call_that_is_polled_to_its_end_is_done_once(ranks, tmp_path):
    assert ranks(2).run(_seen_by_polling, str(tmp_path)) == [(1, 1), (1, 1)]


def test_files_are_bounded_and_whole_lines_are_read(tmp_path):
    file = LineFile(tmp_path, "log", 0, 1000, lambda: "head\n")
    writer = Writer(file, lambda number: f"line {number}\n")
    for number in range(500):
        writer.put(number)
    writer.close()
    files = [path_of(tmp_path, "log", 0, old) for old in (True, False)]
    assert all(path.stat().st_size <= 500 for path in files)
    assert all(path.read_text().startswith("head\n") for path in files)
    lines = [line for line in lines_of(tmp_path, "log", 0) if line != "head\n"]
    assert lines == [f"line {number}\n" for number in range(500 - len(lines), 500)]
    with files[1].open("a") as cut:
        cut.write("line 5")
    assert list(lines_of(tmp_path, "log", 0))[-1] == "line 499\n"


def test_a_summary_is_printed_when_the_job_ends(tmp_path):
    run = launcher.run([sys.executable, str(Path(__file__).parent / "jobs.py"), "summary", str(tmp_path / "run")])
    assert run.status == 0, run.output
    assert "communication of this rank" in run.output
    assert re.search(r"all_reduce .* 4 KB .* 1 .* 0\.00", run.output)
    assert not any((tmp_path / "run").iterdir())  # a summary needs no files


def _off():
    unobserved()
    runtime = face().runtime
    return runtime.session, runtime._observers, type(runtime.progress).__name__


def test_nothing_stands_on_the_way_of_a_call_when_nothing_is_asked(ranks):
    assert ranks(2).run(_off) == [(None, (), "Progress")] * 2


def test_the_block_is_checked():
    assert parse({"observe": {"log": True}}).observe.anything
    assert not parse({}).observe.anything
    with pytest.raises(ConfigError, match=r'unknown key "trase".*"trace"'):
        parse({"observe": {"trase": True}})


def _stock_log():
    """DeepSpeed's own log: (algbw, busbw) x milliseconds / bytes, by operation."""
    import deepspeed.comm as dist

    n, rank = dist.get_world_size(), dist.get_rank()
    pair = dist.new_group([0, 1])
    dist.configure(enabled=True, prof_all=True)
    try:
        dist.all_reduce(torch.ones(1000))
        dist.all_gather_into_tensor(torch.empty(1000 * n), torch.ones(1000))
        dist.reduce_scatter_tensor(torch.empty(1000), torch.ones(1000 * n))
        dist.all_to_all_single(torch.empty(300), torch.ones(300))
        dist.all_gather_object([None] * n, rank)
        if rank < 2:
            dist.all_reduce(torch.ones(10), group=pair, log_name="pair")
    finally:
        dist.configure(enabled=False, prof_all=False)
    found = {}
    for name, by_size in comm.comms_logger.comms_dict.items():
        for size, (_, times, algbws, busbws) in by_size.items():
            if size:
                gbit = size * 8 / times[0] / 1e6
                found[name] = size, round(algbws[0] / gbit, 6), round(busbws[0] / gbit, 6)
    comm.comms_logger.reset_data()
    return found


def test_deepspeeds_own_log_has_the_right_figures(ranks):
    for rank, found in enumerate(ranks(3).run(_stock_log)):
        assert found["all_reduce"] == (4000, 1, pytest.approx(4 / 3, abs=1e-5))
        assert found["all_gather_into_tensor"] == (4000, 3, 2)
        assert found["reduce_scatter_tensor"] == (12000, 1, pytest.approx(2 / 3, abs=1e-5))
        assert found["all_to_all_single"] == (1200, 1, pytest.approx(2 / 3, abs=1e-5))
        assert ("pair" in found) == (rank < 2)
        if rank < 2:
            assert found["pair"] == (40, 1, 1)
