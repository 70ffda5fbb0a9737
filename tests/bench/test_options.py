import argparse

import pytest

from deepspeed_mcrdl.bench import options


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("256", [256]), ("256,64k,1M", [256, 65536, 1048576]), ("256:16K", [256, 1024, 4096, 16384]), ("1G", [2**30])],
)
def test_sizes(text, wanted):
    assert options.sizes(text) == wanted


@pytest.mark.parametrize("text", ["", "abc", "0", "-4", "256:", "1.5M", "4T"])
def test_wrong_sizes(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size in bytes"):
        options.sizes(text)
