"""A bug report holds no personal paths, however they are spelled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from attnx.cli._redact import redactor

JO = [("/srv/people/jo", "~"), ("/srv/people/jo/.venv/lib/site-packages", "<site-packages>")]
PLACES = {
    "home": ("no file /srv/people/jo/x.py", "no file ~/x.py"),
    "longest first": ("/srv/people/jo/.venv/lib/site-packages/a.py", "<site-packages>/a.py"),
    "other case": ("/SRV/People/JO/x", "~/x"),
    "backslashes": (r"\srv\people\jo\x", r"~\x"),
    "a repr of a repr": (r"\\srv\\people\\jo\\x", r"~\\x"),
    "doubled": ("//srv//people//jo//x", "~//x"),
    "URL": ("file:///srv/people/jo/x", "file:~/x"),
    "quoted": ("'/srv/people/jo'", "'~'"),
    "end of a sentence": ("cannot read /srv/people/jo.", "cannot read ~."),
    "a traceback": ('  File "/srv/people/jo/x.py", line 3', '  File "~/x.py", line 3'),
    "somebody else": ("/srv/people/joan/x", "/srv/people/joan/x"),
    "another's home": ("/home/ann/build/x.c:3", "~/build/x.c:3"),
    "another's Mac": ("/Users/ann.b/x", "~/x"),
    "another's Windows": (r"C:\Users\Ann B\x", r"~\x"),
    "a drive in a sentence": (r"C:\Users\ann: no C:\x", r"~: no C:\x"),
    "no path": ("declares softcap", "declares softcap"),
}


@pytest.mark.parametrize("kind", PLACES)
def test_a_path_is_found_in_every_spelling(kind: str) -> None:
    given, expected = PLACES[kind]
    assert redactor(JO, user="")(given) == expected


WINDOWS = [(r"C:\Users\Jo Doe", "~")]
SPELLED = {
    "as it is": (r"C:\Users\Jo Doe\x.py", r"~\x.py"),
    "a repr": (r"'C:\\Users\\Jo Doe\\x.py'", r"'~\\x.py'"),
    "slashes": ("c:/users/jo doe/x.py", "~/x.py"),
    "a URL": ("file:///C:/Users/Jo%20Doe/x.py", "file:///~/x.py"),
}


@pytest.mark.parametrize("kind", SPELLED)
def test_a_home_with_a_drive_and_a_space_is_found(kind: str) -> None:
    given, expected = SPELLED[kind]
    assert redactor(WINDOWS, user="")(given) == expected


def test_a_home_is_found_by_its_real_path_and_by_its_link(tmp_path: Path) -> None:
    real, link = tmp_path / "disk" / "pat", tmp_path / "pat"
    real.mkdir(parents=True)
    link.symlink_to(real)
    clean = redactor([(str(link), "~")], user="")
    assert clean([f"{link}/a", f"{os.path.realpath(link)}/b"]) == ["~/a", "~/b"]


def test_a_name_that_is_not_ascii_is_found_escaped_too() -> None:
    clean = redactor([("/srv/jörg", "~")], user="jörg")
    assert clean(["/srv/jörg/x", r"/srv/j\xf6rg/x", "/srv/j%C3%B6rg/x"]) == ["~/x"] * 3
    assert clean("asked by Jörg") == "asked by <user>"


def test_the_users_name_goes_where_it_stands_by_itself() -> None:
    clean = redactor([], user="jo")
    assert clean("owner jo@host, /mnt/jo/x, but join and a-jo") == (
        "owner <user>@host, /mnt/<user>/x, but join and a-jo"
    )


@pytest.mark.parametrize("user", ["root", "Runner", "torch"])
def test_a_name_that_is_a_word_of_reports_is_none(user: str) -> None:
    """Whoever is called as a framework is has no name to lose."""
    text = f"the {user.lower()} of it"
    assert redactor([], user=user, keep=["torch"])(text) == text


def test_this_machines_own_places_are_taken_out_of_a_whole_document(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = tmp_path / "homes" / "kim.o"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("LOGNAME", "kim.o")
    document = {f"{home}/key": [f"{home}/x", {"in": (np_file(), f"{tmp_path}/y", 3, None)}]}
    found = redactor()(document)
    assert found["~/key"][0] == "~/x"
    package, temporary, *rest = found["~/key"][1]["in"]
    assert package == "<site-packages>/numpy/__init__.py"
    assert temporary.startswith("<temp>/")
    assert rest == [3, None]
    assert "kim" not in str(found)


def np_file() -> str:
    import numpy

    return numpy.__file__


@pytest.mark.parametrize("home", ["/", "", "C:"])
def test_a_home_that_is_no_place_of_its_own_replaces_nothing(home: str) -> None:
    assert redactor([(home, "~")], user="")("/usr/lib and C:/x") == "/usr/lib and C:/x"
