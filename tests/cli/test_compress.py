"""megasparse compress and decompress, with a model trained for two steps."""

import pytest

from megasparse.cli.main import main
from megasparse.errors import UserError
from megasparse.runs import compression
from tests.helpers.trained import prepared, trained


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("coder")
    trained(prepared(folder), folder / "run", ["lsh", "local"], 2)
    return folder / "run"


def test_a_file_comes_back_byte_for_byte(run, tmp_path, capsys):
    (tmp_path / "a.bin").write_bytes(bytes(reversed(range(256))) + b"\0ends here")
    main(["compress", str(tmp_path / "a.bin"), "--checkpoint", str(run)])
    assert "266 bytes became" in capsys.readouterr().out
    main(["decompress", str(tmp_path / "a.bin.msz"), "--checkpoint", str(run), "--output", str(tmp_path / "b.bin")])
    assert (tmp_path / "b.bin").read_bytes() == (tmp_path / "a.bin").read_bytes()


def test_what_is_refused_leaves_nothing(run, tmp_path):
    source, packed, out = tmp_path / "a.txt", tmp_path / "a.txt.msz", tmp_path / "out"
    source.write_bytes(b"some text of no great length")
    compression.compress(run, source, packed)
    damaged = tmp_path / "damaged.msz"
    damaged.write_bytes(packed.read_bytes()[:-1] + bytes([packed.read_bytes()[-1] ^ 1]))
    for path, message in ((damaged, "it is damaged"), (source, "not made by"), (tmp_path / "none", "cannot be read")):
        with pytest.raises(UserError, match=message):
            compression.decompress(run, path, out)
    with pytest.raises(UserError, match="a file already"):
        compression.compress(run, source, packed)
    (tmp_path / "empty").touch()
    with pytest.raises(UserError, match="the file is empty"):
        compression.compress(run, tmp_path / "empty", out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "a.txt.msz", "damaged.msz", "empty"]
