"""Files that are on disk when a function says so."""

from pathlib import Path

import pytest

from clipless.runs.durable_files import replace_file
from syncing import Call, recorded


@pytest.mark.parametrize("before", [None, b"old"])
@pytest.mark.parametrize("content", [b"", b"new", b"n" * 100_000])
def test_a_file_is_synced_whole_then_moved_then_its_folder_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, before: bytes | None
) -> None:
    path = tmp_path / "file"
    if before is not None:
        path.write_bytes(before)
    calls = recorded(monkeypatch)
    replace_file(path, lambda file: file.write(content))
    assert path.read_bytes() == content
    file, folder = path.stat().st_ino, tmp_path.stat().st_ino
    assert calls == [
        Call("sync file", file, len(content)),
        Call("replace", file, len(content)),
        Call("sync folder", folder, 0),
    ]
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(TypeError):
        replace_file(path, lambda file: file.write("no bytes"))  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
