import json
import sys

import pytest

from deepspeed_mcrdl import cli
from tests import launcher
from tests.backends import BACKENDS


def mcrdl(*args, **env):
    return launcher.run([str(launcher.BIN / "mcrdl"), *args], **env)


def compression(block):
    return {"comm_backend": "mcrdl", "mcrdl": {"compression": block}}


def test_report_has_a_line_for_each_backend():
    run = mcrdl("report")
    assert run.status == 0
    assert [line for line in run.output.splitlines() if line.startswith(("mpi ", "gloo ", "nccl "))] != []
    assert "usable: MPICH" in run.output
    assert run.lines("codecs: ")[0].startswith("bf16, dgc, fp16, graddrop, int8")
    assert "nccl   not usable" in run.output or "nccl   usable" in run.output


def test_both_commands_answer():
    for command in ([str(launcher.BIN / "mcrdl")], [sys.executable, "-m", "deepspeed_mcrdl"]):
        assert "validate" in launcher.run([*command, "--help"]).output


def test_a_command_shows_its_own_usage_for_what_it_doesnt_know(capsys):
    for command in (["validate", "x.json"], ["trace", "merge", "x"], ["bench", "ops"]):
        with pytest.raises(SystemExit):
            cli.main([*command, "--colour", "red"])
        said = capsys.readouterr().err
        assert said.startswith(f"usage: mcrdl {' '.join(word for word in command if 'x' not in word)}"), said
        assert "unrecognized arguments: --colour red" in said


def test_tables_have_a_schema_too(capsys):
    assert cli.main(["schema", "--table"]) == 0
    assert {"version", "fingerprint", "entries"} <= set(json.loads(capsys.readouterr().out)["properties"])


def test_the_map_in_force_is_shown_with_its_reasons(capsys, tmp_path):
    path = tmp_path / "ds_config.json"
    rule = [{"max_bytes": 4096, "backend": "mpi"}, {"backend": "gloo"}]
    block = {"routing": {"all_reduce": rule, "groups": {"expert_parallel": {"default": "gloo"}}}}
    block["compression"] = {"codec": "int8"}
    path.write_text(json.dumps({"comm_backend": "mcrdl", "mcrdl": block}))
    assert cli.main(["report", "--routes", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [[part.strip() for part in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert "compression: int8, all_reduce on data_parallel groups, from 65536 bytes, where it is faster" in lines
    assert ["all_reduce", "world", "any", "up to 4096 B", "mpi", "routing.all_reduce, up to 4096 bytes"] in rows
    assert ["all_reduce", "world", "any", "above 4096 B", "gloo", "routing.all_reduce"] in rows
    assert ["barrier", "world", "any", "all", BACKENDS[0], "preference order"] in rows
    assert ["barrier", "expert_parallel", "any", "all", "gloo", "routing.groups.expert_parallel.default"] in rows
    assert cli.main(["report", str(path)]) == 2


def test_the_schema_is_json_schema(capsys):
    assert cli.main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) == {
        *("backends", "routing", "tuning", "observe", "fusion", "chunk", "compression", "timeout_s", "checked"),
        "banner",
    }


@pytest.mark.parametrize(
    ("config", "status", "text"),
    [
        ({"comm_backend": "mcrdl"}, 0, "right"),
        ({"comm_backend": "mcrdl", "mcrdl": {"backends": ["gloo"]}}, 0, "right"),
        ({"comm_backend": "mcrdl", "mcrdl": {"backends": ["glo"]}}, 2, 'Did you mean "gloo"'),
        (compression({"codec": "int8"}), 0, "right"),
        (compression({"codec": "int9"}), 2, 'unknown codec "int9" in "mcrdl.compression". Did you mean "int8"?'),
        (compression({"codec": "dgc", "options": {"ration": 0.1}}), 2, 'no option "ration". Did you mean "ratio"?'),
        (compression({"codec": "tbq", "options": {"threshold": 0}}), 2, "it must be above 0"),
        (compression({"codec": "int8", "groups": ["data_paralel"]}), 2, 'Did you mean "data_parallel"?'),
        (compression({"codec": "onebit", "operations": ["all_to_all_single"]}), 2, "needs error feedback"),
        ({"comm_backend": "mcrld"}, 2, 'Did you mean "mcrdl"'),
        ({"train_batch_size": 3}, 2, 'add "comm_backend": "mcrdl"'),
    ],
)
def test_a_config_is_validated_before_a_job(tmp_path, capsys, config, status, text):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    assert cli.main(["validate", str(path)]) == status
    shown = capsys.readouterr()
    assert text in shown.out + shown.err


def test_a_missing_or_broken_file_is_a_sentence(tmp_path, capsys):
    broken = tmp_path / "ds.json"
    broken.write_text("{")
    for path, text in ((tmp_path / "none.json", "there is no file"), (broken, "is not a JSON object")):
        assert cli.main(["validate", str(path)]) == 2
        assert text in capsys.readouterr().err
