"""What is installed carries the licenses of everything that is in it."""

from __future__ import annotations

from importlib import metadata


def test_the_licenses_of_what_is_compiled_in_are_installed() -> None:
    texts = {
        file.name: file.read_text() for file in metadata.files("ronde") or () if "licenses" in file.parts
    }
    assert "Apache License" in texts["LICENSE"]
    notice = texts["LICENSE-nanobind"]
    assert "Copyright (c) 2022 Wenzel Jakob" in notice
    assert "Redistributions in binary form must reproduce" in notice
    assert "Copyright (c) 2017 Thibaut Goetghebuer-Planchon" in notice
    assert "The above copyright notice and this permission notice shall be included in" in notice
