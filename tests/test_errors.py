"""The parts of one-line messages, whatever goes into them."""

import os

from mlxrl.errors import WIDEST, UserError, place_of


def test_a_message_is_a_line_of_bounded_parts():
    """A part may be a whole file by mistake, or have line ends in it."""
    error = UserError("run.toml", "", "x" * 100_000, "wanted\na text")
    assert error.parts == ("run.toml", "x" * (WIDEST - 3) + "...", "wanted a text")
    assert str(error.within("here")) == ": ".join(("here", *error.parts))


def test_the_place_of_an_exception_is_known_in_a_folder_that_has_gone(tmp_path, monkeypatch):
    def raised():
        try:
            raise ValueError
        except ValueError as error:
            return place_of(error)

    line = raised.__code__.co_firstlineno + 2
    monkeypatch.chdir(os.path.dirname(__file__))
    assert raised() == f" (test_errors.py, line {line})"
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert raised() == f" ({__file__}, line {line})"
