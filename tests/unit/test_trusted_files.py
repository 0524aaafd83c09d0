"""Files where everybody may make files: what another user has put there is neither followed nor believed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.other_user import NOBODY

from ronde.errors import UsageError
from ronde.stores.file import FileStore
from ronde.trusted_files import create_anew, open_for_writing, open_kept

KERNEL = (
    "Permission denied"  # what many systems say by themselves (fs.protected_regular, fs.protected_symlinks)
)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A directory like /tmp."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    return tmp_path / "shared"


def test_a_draft_is_a_new_file_whatever_was_there(shared: Path) -> None:
    ours, draft = shared / "ours", shared / "draft"
    ours.write_text("precious")
    draft.symlink_to(ours)
    os.close(create_anew(draft))
    assert ours.read_text() == "precious"
    assert not draft.is_symlink()
    with draft.open() as before:
        os.write(fd := create_anew(draft), b"new")
        os.close(fd)
        assert before.read() == ""  # of whoever has it open
    assert draft.read_text() == "new"


def test_our_own_links_are_followed(shared: Path) -> None:
    (shared / "link").symlink_to(shared / "ours")
    os.close(open_for_writing(shared / "link", os.O_TRUNC))
    os.close(open_kept(shared / "link"))
    assert (shared / "ours").exists()
    os.close(open_for_writing("/dev/null", os.O_TRUNC))


@pytest.mark.root
def test_the_store_of_a_squatter_is_refused(shared: Path) -> None:
    """It would say where ranks meet, and could be read; in a directory that is ours a file is its owner's affair."""
    place = shared / "meeting"
    place.touch(0o666)
    os.chown(place, NOBODY, NOBODY)
    with pytest.raises(UsageError, match=f"it belongs to user {NOBODY}, in a directory|{KERNEL}"):
        FileStore(str(place))
    place.unlink()
    place.symlink_to(shared / "elsewhere")
    os.chown(place, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(UsageError, match=f"Too many levels of symbolic links|{KERNEL}"):
        FileStore(str(place))
    assert not (shared / "elsewhere").exists()
