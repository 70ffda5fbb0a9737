import base64
import json

import pytest

from deepspeed_mcrdl.config import MCRDLConfig, find, from_argv, load, parse
from deepspeed_mcrdl.errors import ConfigError


def test_the_selecting_key_alone_is_enough():
    assert find({"comm_backend": "mcrdl"}) == MCRDLConfig()


def test_without_the_key_nothing_is_selected():
    assert find({"train_batch_size": 8}) is None
    assert find({"comm_backend": None}) is None


def test_a_whole_block():
    config = parse(
        {
            "backends": ["mpi", "gloo"],
            "routing": {
                "default": "auto",
                "all_to_all_single": "mpi",
                "all_reduce": [{"max_bytes": 65536, "backend": "mpi"}, {"backend": "gloo"}],
                "groups": {"expert_parallel": {"default": "mpi"}},
            },
        }
    )
    assert config.routing.operations["all_to_all_single"] == "mpi"
    assert config.routing.operations["all_reduce"][0].max_bytes == 65536
    assert config.routing.groups["expert_parallel"].default == "mpi"
    assert config.routing.backends() == {"mpi", "gloo"}


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"backend": ["mpi"]}, 'unknown key "backend".*"backends"'),
        ({"routing": {"all_reduec": "mpi"}}, 'unknown operation "all_reduec".*"all_reduce"'),
        ({"routing": {"groups": {"expert_paralel": {}}}}, 'unknown kind of group "expert_paralel".*"expert_parallel"'),
        ({"routing": {"groups": {"world": {"brodcast": "mpi"}}}}, '"brodcast".*"broadcast"'),
        ({"routing": {"send": "mpi"}}, '"send_recv"'),
        ({"backends": ["mpi"], "routing": {"default": "mpy"}}, '"mpy", which is not in "backends".*"mpi"'),
        ({"compression": {"mode": "on"}}, 'in "mcrdl.compression": names no "codec"'),
        ({"compression": {"codec": "dgc", "options": {"ratio": "0.1"}}}, 'compression.options.ratio": .*, got "0.1"'),
        ({"compression": {"codec": "dgc", "options": {"ratio": True}}}, "compression.options.ratio"),
        ({"compression": "int8"}, 'in "mcrdl.compression": must be an object, .*, got "int8"'),
        ({"chunk": True}, 'in "mcrdl.chunk": must be an object'),
        ({"backends": []}, "empty"),
        ({"backends": 3}, "mcrdl.backends"),
        ({"routing": {"all_reduce": 7}}, "all_reduce"),
        ({"routing": {"all_reduce": []}}, "is empty"),
        ({"routing": {"all_reduce": [{"max_bytes": 9, "backend": "mpi"}]}}, "last step"),
        ({"routing": {"all_reduce": [{"backend": "mpi"}, {"backend": "gloo"}]}}, 'but the last needs "max_bytes"'),
        ({"routing": {"all_reduce": [{"max_byte": 9, "backend": "mpi"}, {"backend": "gloo"}]}}, "max_byte"),
        (
            {
                "routing": {
                    "all_reduce": [
                        {"max_bytes": 9, "backend": "mpi"},
                        {"max_bytes": 8, "backend": "mpi"},
                        {"backend": "gloo"},
                    ]
                }
            },
            r"out of order.*\[9, 8\]",
        ),
        ({"compression": {"codek": "int8"}}, 'unknown key "codek".*"codec"'),
        ({"compression": {"groups": ["data_paralel"]}}, 'unknown kind of group "data_paralel".*"data_parallel"'),
        ({"compression": {"operations": ["broadcast"]}}, "mcrdl.compression.operations.*all_reduce"),
        ({"compression": {"min_bytes": 100}}, "mcrdl.compression.min_bytes.*4096"),
        ({"compression": {"mode": "auto"}}, "mcrdl.compression.mode.*'plan' or 'on'"),
        ("mpi", "mcrdl"),
    ],
)
def test_a_wrong_block_is_named_with_the_right_word(block, text):
    with pytest.raises(ConfigError, match=text):
        parse(block)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"comm_backend": "mcrld"}, 'unknown "comm_backend": "mcrld". Did you mean "mcrdl"'),
        ({"com_backend": "mcrdl"}, 'unknown key "com_backend".*"comm_backend"'),
        ({"comm_backend": 3}, 'The only value is "mcrdl"'),
    ],
)
def test_a_misspelt_selection_is_an_error(config, text):
    # DeepSpeed 653, 774: it ignores keys that it doesn't know
    with pytest.raises(ConfigError, match=text):
        find(config)


def test_a_config_is_found_in_all_its_forms(tmp_path):
    config = {"comm_backend": "mcrdl", "train_batch_size": 2}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config)[:-1] + "  # hjson takes comments\n}")
    encoded = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
    for source in (config, str(path), path, encoded, json.dumps(config)):
        assert load(source) == config
    for source in (None, 3, "no/such/file.json", "%%%", ["a"]):
        assert load(source) is None


@pytest.mark.parametrize("option", ["--deepspeed_config", "--deepspeed", "--ds_config", "--deepspeed-config"])
@pytest.mark.parametrize("form", ["{} {}", "{}={}"])
def test_the_command_line_is_read_in_all_its_forms(tmp_path, option, form):
    path = tmp_path / "ds.json"
    path.write_text('{"comm_backend": "mcrdl"}')
    argv = ["--lr", "1", *form.format(option, path).split(), "--steps", "3"]
    assert from_argv(argv) == {"comm_backend": "mcrdl"}


def test_a_flag_without_a_config_is_no_config():
    # `--deepspeed --deepspeed_config ds.json`: the first is a switch in many scripts
    assert from_argv(["--deepspeed"]) is None
    assert from_argv(["--deepspeed", "--steps", "3"]) is None
