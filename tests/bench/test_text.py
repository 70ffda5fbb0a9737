import pytest
import torch

from deepspeed_mcrdl.bench.workloads.text import ByteText, standard_library


def test_the_default_is_megabytes_of_real_text():
    files = standard_library()
    assert files == sorted(files)
    assert sum(file.stat().st_size for file in files) > 3_000_000
    assert len(ByteText(128)) > 20_000


def test_targets_are_the_next_bytes(tmp_path):
    text = bytes(range(256)) * 2
    (tmp_path / "text").write_bytes(text)
    tokens, targets = ByteText(16, [tmp_path / "text"])[0]
    assert tokens.tolist() == list(text[16:32])  # the first window is held out
    assert targets.tolist() == list(text[17:33])
    assert tokens.dtype == torch.int64


def test_held_out_text_is_not_trained_on(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(250)) * 2)
    training, held_out = ByteText(10, [tmp_path / "text"]), ByteText(10, [tmp_path / "text"], held_out=True)
    assert len(training) + len(held_out) == 49
    assert not set(training._windows) & set(held_out._windows)


def test_too_little_text_is_an_error(tmp_path):
    (tmp_path / "text").write_bytes(b"short")
    with pytest.raises(ValueError, match="5 bytes of text are too few: 161 are needed"):
        ByteText(16, [tmp_path / "text"])
