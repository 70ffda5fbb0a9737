import json
import threading
import time

import pytest
from torch._C._distributed_c10d import HashStore

from deepspeed_mcrdl import cli
from deepspeed_mcrdl.observe.clock import offset_ns
from deepspeed_mcrdl.observe.files import path_of
from deepspeed_mcrdl.observe.stragglers import late
from tests.observe.programs import profiled, traced


@pytest.fixture(scope="module")
def run(ranks, tmp_path_factory):
    """Return (folder, each rank's straggler rows) of a traced run of two ranks."""
    folder = tmp_path_factory.mktemp("run")
    return folder, ranks(2).run(traced, str(folder))


def _merged(folder):
    assert cli.main(["trace", "merge", str(folder)]) == 0
    return json.loads((folder / "trace.json").read_text())["traceEvents"]


def test_a_trace_has_a_slice_for_each_call_and_its_parts(run):
    events = _merged(run[0])
    for rank in (0, 1):
        own = [event for event in events if event["pid"] == rank]
        tracks = {event["tid"]: event["args"]["name"] for event in own if event["name"] == "thread_name"}
        assert list(tracks.values()) == ["mpi"]
        calls = [event for event in own if event["name"] == "all_reduce"]
        assert [event["args"]["sequence"] for event in calls] == [2, 3, 4, 5, 6]
        assert {event["args"]["bytes"] for event in calls} == {1024}
        assert {event["args"]["backend"] for event in calls} == {"mpi"}
        waits = [event for event in own if event["name"] == "wait"]
        for event in calls:
            inside = [
                w for w in waits if event["ts"] <= w["ts"] and w["ts"] + w["dur"] <= event["ts"] + event["dur"] + 1
            ]
            assert inside
        begins, ends = ([e for e in own if e["ph"] == phase] for phase in "be")
        assert [e["id2"] for e in begins] == [e["id2"] for e in ends]
        assert ends[0]["ts"] - begins[0]["ts"] >= 5000
        assert sum(event["name"] == "all_reduce wait" for event in own) == 1


def test_the_ranks_have_one_time(run):
    events = [event for event in _merged(run[0]) if event["name"] == "all_reduce"]
    for number in range(2, 7):
        ends = [event["ts"] + event["dur"] for event in events if event["args"]["sequence"] == number]
        starts = {event["pid"]: event["ts"] for event in events if event["args"]["sequence"] == number}
        assert min(ends) > max(starts.values())  # none ends before all have come
        assert starts[1] - starts[0] > 5000


def test_a_trace_of_a_rank_opens_as_it_is_and_survives_a_kill(run):
    path = path_of(run[0], "trace", 0)
    text = path.read_text()
    assert len(json.loads(text.rstrip(",\n") + "]")) > 10  # Perfetto takes an array without its end
    whole = _merged(run[0])
    path.write_text(text[:-20])
    assert len(_merged(run[0])) == len(whole) - 1
    path.write_text(text)


def test_a_folder_without_traces_is_a_sentence(tmp_path, capsys):
    assert cli.main(["trace", "merge", str(tmp_path)]) == 2
    assert "there is no file trace.RANK.json in" in capsys.readouterr().err


def test_the_late_rank_is_named_on_every_rank(run):
    first, second = run[1]
    assert first == second
    worst = first[0]
    assert (worst["operation"], worst["slowest"], worst["ranks"], worst["calls"]) == ("all_reduce", 1, 2, 6)
    assert worst["late_us"] > 5000
    assert worst["last"] >= 5 / 6


def test_lateness_counts_only_calls_that_all_have_made():
    rows = late([[("barrier", 0, 2, 1, 1000), ("barrier", 0, 2, 2, 9000)], [("barrier", 0, 2, 1, 3000)]])
    assert rows == [
        {"operation": "barrier", "group": 0, "ranks": 2, "calls": 1, "slowest": 1, "late_us": 2.0, "most_us": 2.0,
         "last": 1.0}
    ]  # fmt: skip


def test_a_clock_on_another_host_is_compared_over_the_store():
    store, ahead_ns, found = HashStore(), 5_000_000_000, {}

    def rank(number, machine, ahead):
        found[number] = offset_ns(store, number, 3, 20, lambda: time.monotonic_ns() + ahead, machine)

    threads = [threading.Thread(target=rank, args=args) for args in ((0, "a", 0), (1, "b", ahead_ns), (2, "a", 0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found[0] == found[2] == 0
    assert abs(found[1] + ahead_ns) < 5_000_000


def test_torchs_profiler_has_a_range_for_each_call(ranks, tmp_path):
    assert ranks(2).run(profiled, str(tmp_path)) == [["mcrdl all_reduce mpi 1024 B"]] * 2
