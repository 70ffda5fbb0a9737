import csv
import json

import pytest

from deepspeed_mcrdl.bench import ops
from deepspeed_mcrdl.bench.cases import DTYPES, case_names, make_case
from deepspeed_mcrdl.bench.job import meshes_of
from deepspeed_mcrdl.bench.launch import free_port
from deepspeed_mcrdl.bench.measure import copy_peak_GBps
from deepspeed_mcrdl.operations import OPERATIONS
from deepspeed_mcrdl.runtime import current
from tests import launcher
from tests.backends import BACKENDS
from tests.programs import use

KEYS = [
    *("operation", "bytes", "count", "dtype", "redop", "world_size", "mesh", "backend", "route"),
    *("median_us", "mean_us", "p99_us", "min_us", "algbw_GBps", "busbw_GBps", "wrong", "samples"),
]
ALL_WAYS = "mpi,direct:mpi,mpi4py,gloo,torch:gloo,auto"


def bench(*arguments):
    return launcher.run([str(launcher.BIN / "mcrdl"), "bench", "ops", *arguments])


def test_every_operation_is_measured_by_every_backend(tmp_path):
    json_file, csv_file, plot = (tmp_path / name for name in ("x.json", "x.csv", "x.png"))
    files = ("--json", str(json_file), "--csv", str(csv_file), "--plot", str(plot))
    run = bench("--ranks", "2", "--sizes", "256,64K", "--iterations", "5", *files)
    assert run.status == 0, run.output
    rows = json.loads(json_file.read_text())["rows"]
    assert list(rows[0]) == KEYS
    assert {row["operation"] for row in rows} == set(case_names())
    assert {row["backend"] for row in rows} == {*BACKENDS, "auto"}
    assert all(row["wrong"] == 0 and row["samples"] in range(5, 41) for row in rows)
    for row in rows:
        operation = OPERATIONS["send" if row["operation"] == "send_recv" else row["operation"]]
        assert row["algbw_GBps"] == pytest.approx(row["bytes"] / row["median_us"] / 1e3)
        assert row["busbw_GBps"] == pytest.approx(row["algbw_GBps"] * operation.busbw_factor(2))
    with csv_file.open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(rows)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_it_runs_under_torchrun_beside_other_interfaces_and_asynchronously(tmp_path):
    arguments = ["bench", "ops", "--ops", "all_reduce,send_recv", "--sizes", "4K", "--seconds", "0.05", "--async",
                 "--backends", ALL_WAYS, "--json", str(tmp_path / "x.json")]  # fmt: skip
    torchrun = [
        str(launcher.BIN / "torchrun"),
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
        "--no-python",
    ]
    run = launcher.run([*torchrun, str(launcher.BIN / "mcrdl"), *arguments])
    assert run.status == 0, run.output
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert {row["backend"] for row in rows if row["operation"] == "all_reduce"} == set(ALL_WAYS.split(","))
    assert "mpi4py" not in {row["backend"] for row in rows if row["operation"] == "send_recv"}
    for row in rows:
        if row["backend"] != "mpi4py":
            assert row["issue_us"] > 0
            assert row["both_us"] > row["compute_us"] * 0.5


def test_osus_table(tmp_path):
    run = bench("--ranks", "2", "--ops", "barrier,broadcast", "--sizes", "256", "--iterations", "5", "--omb")
    assert run.status == 0, run.output
    assert "# broadcast latency, by gloo" in run.output
    assert "# Size       Avg Latency(us)" in run.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "give --ranks N"),
        (["--ranks", "1"], "one rank has nobody to communicate with"),
        (["--ranks", "2", "--backends", "gloo,mpj"], 'unknown or unusable backend "mpj"'),
        (["--ranks", "2", "--ops", "allreduce"], 'Did you mean "all_reduce"'),
        (["--ranks", "2", "--sizes", "huge"], "is not a size in bytes"),
        (["--ranks", "2", "--table", "/nowhere.json"], "the tuning table /nowhere.json can't be read"),
    ],
)
def test_a_wrong_option_is_one_sentence(arguments, text):
    run = bench(*arguments)
    assert run.status in (1, 2)
    assert text in run.output
    assert "Traceback" not in run.output


def row(**more):
    return {"operation": "broadcast", "bytes": 1, "backend": "x", "wrong": 0, "busbw_GBps": 1.0} | more


def test_a_wrong_result_or_an_impossible_speed_is_an_error(capsys):
    assert ops._verdict([row()], copy_peak=10.0) == 0
    assert ops._verdict([row(wrong=2)], copy_peak=10.0) == 1
    assert ops._verdict([row(busbw_GBps=11.0)], copy_peak=10.0) == 1
    assert "so the call returned before it was done" in capsys.readouterr().err
    assert copy_peak_GBps() > 0.5


def _cases_see_a_wrong_result(dtype_name):
    use({})
    runtime = current()
    world = runtime.groups.world
    dtype = DTYPES[dtype_name]
    seen = []
    for name in case_names():
        if name == "barrier":
            continue
        case = make_case(name, world, 4096, dtype)
        if case.operation.reduces and "sum" not in next(iter(runtime.backends.values())).reductions.get(dtype, ()):
            continue
        case.prepare()
        receives = runtime.rank == 1 if name in ("scatter", "scatterv", "broadcast") else runtime.rank == 0
        assert not receives or not case.right(), f"{name}: right before the call"
        case.run(lambda operation, args, async_op=False: runtime.issue(operation, None, args, async_op))
        assert case.right(), name
        assert abs(case.bytes - 4096) <= 4096 // 8
        seen.append(name)
    return seen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int16", "complex64", "bool", "float8_e4m3fn"])
def test_a_case_is_right_after_its_call_and_not_before(ranks, dtype):
    seen = ranks(2).run(_cases_see_a_wrong_result, dtype)[0]
    assert {"broadcast", "all_to_all_single", "gatherv", "send_recv"} <= set(seen)


def test_a_job_is_cut_into_the_groups_that_parallelism_makes():
    one_host = {str(mesh): groups for mesh, groups in meshes_of(["a"] * 4).items()}
    assert one_host == {"1x4/1": [[0, 1, 2, 3]], "1x2/1": [[0, 1], [2, 3]], "1x2/2": [[0, 2], [1, 3]]}
    two_hosts = {str(mesh): groups for mesh, groups in meshes_of(["a", "a", "b", "b"]).items()}
    assert two_hosts == {"2x2/1": [[0, 1, 2, 3]], "1x2/1": [[0, 1], [2, 3]], "2x1/2": [[0, 2], [1, 3]]}
    assert str(next(iter(meshes_of(["a"] * 3)))) == "1x3/1"


def test_auto_is_compared_with_each_backend_and_with_the_best():
    rows = [
        {"operation": "broadcast", "bytes": size, "mesh": "1x2/1", "backend": name, "median_us": us}
        for size, medians in (
            (1, {"mpi": 10.0, "gloo": 40.0, "auto": 10.0}),
            (2, {"mpi": 90.0, "gloo": 20.0, "auto": 22.0}),
        )
        for name, us in medians.items()
    ]
    sentences = ops.summary(rows)
    assert sentences[0].startswith("auto against mpi: 2.02 times as fast")
    assert sentences[1].startswith("auto against gloo: 1.91 times as fast")
    assert "at most 1.100 times its time (broadcast of 2 bytes), median 1.050" in sentences[2]


def test_the_fastest_of_the_plain_ones_is_marked():
    rows = ops._with_best(
        [{"backend": name, "median_us": us} for name, us in (("auto", 4.0), ("mpi", 5.0), ("gloo", 50.0))]
    )
    assert [row["best"] for row in rows] == ["", "10.00x", ""]
