import json
from datetime import date

import pytest
import torch

from deepspeed_mcrdl import operations as ops
from deepspeed_mcrdl.config import parse
from deepspeed_mcrdl.errors import TableError
from deepspeed_mcrdl.groups import Mesh
from deepspeed_mcrdl.routing.shelf import find_table
from deepspeed_mcrdl.routing.table import Fingerprint, Lookup, Table, dtype_class, parse_table, read_table

HERE = Fingerprint.here({}).model_copy(update={"backends": {"mpi": "MPICH 5.0.2", "gloo": "torch 2.13.0"}})


def entry(mesh=(1, 2, 1), operation="all_reduce", dtype="float", steps=None, unsized="gloo", measured=()):
    return {
        "operation": operation,
        "dtype": dtype,
        "device": "cpu",
        "mesh": dict(zip(("nodes", "ranks_per_node", "stride"), mesh, strict=True)),
        "steps": [{"max_bytes": 4096, "backend": "mpi"}, {"backend": "gloo"}] if steps is None else steps,
        "unsized": unsized,
        "measured": measured,
    }


def table(*entries, fingerprint=HERE, **more):
    content = {"made": str(date.today()), "how": "a test", "fingerprint": fingerprint.model_dump(), "entries": entries}
    return Table.model_validate(content | more)


def look_up(made, mesh, size=100, operation=ops.ALL_REDUCE, dtype=torch.float32, able=lambda name: True):
    found = Lookup(made).entry(operation, dtype, "cpu", Mesh(*mesh))
    return found and found.choose(size, able)


@pytest.mark.parametrize(
    ("size", "backend"), [(0, "mpi"), (4096, "mpi"), (4097, "gloo"), (2**40, "gloo"), (None, "gloo")]
)
def test_sizes_take_their_step(size, backend):
    assert look_up(table(entry()), (1, 2, 1), size)[0] == backend


def test_the_nearest_mesh_speaks_and_one_host_never_for_several():
    one = [{"backend": "mpi"}]
    other = [{"backend": "gloo"}]
    made = table(entry((1, 2, 1), steps=one), entry((1, 8, 1), steps=other))
    assert look_up(made, (1, 3, 1))[0] == "mpi"
    assert look_up(made, (1, 4, 1))[0] == "mpi"  # as near to both: the smaller
    assert look_up(made, (1, 6, 1))[0] == "gloo"
    assert look_up(made, (1, 8, 4))[0] == "gloo"
    assert look_up(made, (4, 1, 1)) is None
    across = table(entry((1, 4, 1), steps=one), entry((4, 1, 1), steps=other))
    assert look_up(across, (1, 4, 1))[0] == "mpi"
    assert look_up(across, (4, 1, 1))[0] == "gloo"
    assert look_up(across, (2, 2, 1))[0] == "gloo"


def test_dtypes_have_classes_and_float_speaks_for_the_unmeasured():
    made = table(entry(), entry(dtype="half", steps=[{"backend": "gloo"}]))
    assert look_up(made, (1, 2, 1), dtype=torch.bfloat16)[0] == "gloo"
    assert look_up(made, (1, 2, 1), dtype=torch.int32)[0] == "mpi"
    assert dtype_class(ops.BROADCAST, torch.bfloat16) == "any"
    assert dtype_class(ops.ALL_REDUCE, torch.float64) == "float"
    assert dtype_class(ops.ALL_REDUCE, torch.bool) == "integer"


def test_both_ends_of_a_message_look_up_one_entry():
    made = table(entry(operation="send_recv", dtype="any"))
    assert look_up(made, (1, 2, 1), operation=ops.SEND) == look_up(made, (1, 2, 1), operation=ops.RECV) is not None


def test_a_backend_that_is_missing_gives_way_to_the_best_measured_one():
    measured = [
        {"bytes": size, "backend": name, "median_us": us, "p10_us": us, "p90_us": us, "samples": 9}
        for size, name, us in (
            (256, "shm", 1),
            (256, "gloo", 90),
            (256, "mpi", 9),
            (65536, "gloo", 5),
            (65536, "mpi", 50),
        )
    ]
    made = table(entry(steps=[{"backend": "shm"}], measured=measured))
    able = {"mpi", "gloo"}.__contains__
    assert look_up(made, (1, 2, 1), 300, able=able)[0] == "mpi"
    assert look_up(made, (1, 2, 1), 50000, able=able)[0] == "gloo"
    assert look_up(made, (1, 2, 1), able={"nccl"}.__contains__) is None


def test_buckets_and_chunks_of_the_nearest_mesh_speak_and_only_of_their_backend():
    sizes = [((1, 2, 1), 65536), ((1, 8, 1), None), ((2, 2, 1), 4096)]
    made = table(
        buckets=[{"backend": "mpi", "mesh": entry(mesh)["mesh"], "max_bytes": size, "gain": 2} for mesh, size in sizes],
        chunks=[
            {"operation": "all_reduce", "backend": "mpi", "mesh": entry(mesh)["mesh"], "max_bytes": size, "gain": 2}
            for mesh, size in sizes
        ],
    )
    found = Lookup(parse_table(made.model_dump_json(), "a path"))
    for mesh, size in (((1, 3, 1), 65536), ((1, 7, 1), None), ((4, 2, 1), 4096)):
        assert found.bucket("mpi", Mesh(*mesh)).max_bytes == size
        assert found.chunk(ops.ALL_REDUCE, "mpi", Mesh(*mesh)).max_bytes == size
    assert found.bucket("gloo", Mesh(1, 2, 1)) is None
    assert found.chunk(ops.ALL_REDUCE, "shm+mpi", Mesh(2, 2, 1)) is None
    assert found.chunk(ops.ALL_TO_ALL_SINGLE, "mpi", Mesh(2, 2, 1)) is None


def test_a_table_of_the_first_version_has_neither():
    content = table(entry()).model_dump(mode="json", exclude={"buckets", "chunks"}) | {"version": 1}
    old = parse_table(json.dumps(content), "a path")
    assert (old.version, old.buckets, old.chunks) == (1, (), ())
    assert look_up(old, (1, 2, 1))[0] == "mpi"


def test_a_table_is_written_whole_and_read_again(tmp_path):
    made = table(entry())
    made.write(tmp_path / "t.json")
    assert read_table(tmp_path / "t.json") == made
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON, or cut off"),
        (table(entry()).model_dump_json()[:-40], "not JSON, or cut off"),
        ("[1, 2]", 'no "entries"'),
        ('{"train_batch_size": 8}', 'no "entries"; `mcrdl tune` makes one'),
        (
            json.dumps({"version": 9, "entries": [], "surprise": 1}),
            "of version 9; this deepspeed_mcrdl reads up to version 2",
        ),
        (json.dumps(table().model_dump(mode="json") | {"entries": [entry(operation="all_reduxe")]}), "all_reduxe"),
        (json.dumps(table().model_dump(mode="json") | {"entries": [entry(steps=[])]}), "size list"),
        (json.dumps(table().model_dump(mode="json") | {"made_by": 1}), "made_by"),
        (
            json.dumps(
                table().model_dump(mode="json")
                | {
                    "chunks": [
                        {"operation": "barrier", "backend": "mpi", "mesh": entry()["mesh"], "max_bytes": 1, "gain": 1}
                    ]
                }
            ),
            "chunks.0",
        ),
    ],
)
def test_what_is_no_table_is_said_with_its_path(text, message):
    with pytest.raises(TableError, match=message.replace("`", ".")) as caught:
        parse_table(text, "some/path.json")
    assert "some/path.json" in str(caught.value)


def tuning(**block):
    return parse({"tuning": block}).tuning


def test_a_missing_or_binary_file_is_an_error(tmp_path):
    with pytest.raises(TableError, match=r"no\.json can't be read: .*No such file"):
        find_table(tuning(table=str(tmp_path / "no.json")), HERE)
    (tmp_path / "b.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TableError, match="can't be read"):
        find_table(tuning(table=str(tmp_path / "b.json")), HERE)


def test_a_named_table_from_elsewhere_is_used_with_a_warning_or_refused(tmp_path, caplog):
    foreign = HERE.model_copy(update={"cpu": "Z80", "backends": {"mpi": "MPICH 4.0", "nccl": "2.27"}})
    table(entry(), fingerprint=foreign).write(tmp_path / "t.json")
    found = find_table(tuning(table=str(tmp_path / "t.json")), HERE)
    assert found is not None
    assert not found.fits
    assert "cpu Z80 there" in caplog.text
    assert "mpi MPICH 4.0 there, MPICH 5.0.2 here" in caplog.text
    assert "nccl" not in caplog.text
    with pytest.raises(TableError, match="cpu Z80 there"):
        find_table(tuning(table=str(tmp_path / "t.json"), strict=True), HERE)


def test_auto_takes_the_newest_that_fits_and_passes_over_what_is_broken(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MCRDL_TABLES", str(tmp_path))
    own = HERE.model_copy(update={"cpu": "a processor of its own"})
    assert find_table(tuning(), own) is None
    table(entry(), fingerprint=own, made="2026-01-01").write(tmp_path / "old.json")
    table(entry(), fingerprint=own, made="2026-02-01").write(tmp_path / "new.json")
    table(entry(), fingerprint=HERE, made="2026-03-01").write(tmp_path / "elsewhere.json")
    (tmp_path / "broken.json").write_text("{")
    found = find_table(tuning(), own)
    assert found.path.name == "new.json"
    table(entry((1, 4, 1)), entry(), fingerprint=own, made="2026-03-01").write(tmp_path / "newest.json")
    assert find_table(tuning(), own, ranks=2).path.name == "new.json"
    assert find_table(tuning(), own, ranks=4).path.name == "newest.json"
    assert find_table(tuning(), own, ranks=3).path.name == "newest.json"
    assert found.fits
    assert "broken.json" in caplog.text
    assert find_table(tuning(table=None), own) is None
