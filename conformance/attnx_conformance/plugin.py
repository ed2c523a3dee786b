"""The suite in a plugin author's own test run.

    pytest -p attnx_conformance.plugin --pyargs attnx_conformance --attnx-backend NAME

Each trial is a test: what is refused as declared passes, what cannot apply is skipped with the
reason, and a known deviation is an expected failure. For isolation from crashes run it under
pytest-xdist, or use `attnx conformance`, which has worker processes of its own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import attnx
from attnx.errors import AttnxError, UnavailableBackend

from ._pool import result_of
from ._worker import trial as examine
from .deviations import load, waive
from .results import Result
from .subject import BackendSubject
from .suite import LEVELS, PROFILES, Selection, Trial, trials

__all__ = ["pytest_addoption", "pytest_generate_tests", "run_trial"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the suite."""
    group = parser.getgroup("attnx", "attnx conformance suite")
    group.addoption(
        "--attnx-backend", action="append", default=[], metavar="NAME",
        help="a registered backend to examine; repeat it for several",
    )  # fmt: skip
    group.addoption(
        "--attnx-deviations", metavar="FILE", help="known deviations of the backend, in TOML"
    )
    group.addoption(
        "--attnx-level", choices=LEVELS, default="standard", help="how much (default: standard)"
    )
    group.addoption(
        "--attnx-profile", action="append", default=[], choices=PROFILES, help="only this profile"
    )
    group.addoption(
        "--attnx-case", action="append", default=[], metavar="PATTERN", help="only these cases"
    )
    group.addoption("--attnx-seed", type=int, default=0, help="of every input")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each trial of each backend."""
    if "attnx_trial" not in metafunc.fixturenames:
        return
    config = metafunc.config
    names = config.getoption("--attnx-backend")
    if not names:
        raise pytest.UsageError("name a backend to examine: --attnx-backend NAME")
    try:
        selection = Selection(
            level=config.getoption("--attnx-level"),
            profiles=tuple(config.getoption("--attnx-profile")),
            cases=tuple(config.getoption("--attnx-case")),
            seed=config.getoption("--attnx-seed"),
        )
        if config.getoption("--attnx-deviations") and len(names) > 1:
            raise pytest.UsageError("--attnx-deviations: a file is about one backend")
        _deviations(config)
        found = [(n, trial) for n in names for trial in trials(_subject(n), selection)]
    except AttnxError as error:
        raise pytest.UsageError(str(error)) from None
    metafunc.parametrize("attnx_trial", found, ids=[_id(n, trial) for n, trial in found])


def _id(name: str, trial: Trial) -> str:
    way = "" if trial.way is None else f"-{trial.way}"
    return f"{name}-{trial.item.name}-{trial.dtype}-{trial.layout}{way}"


@cache
def _subject(name: str) -> BackendSubject:
    subject = BackendSubject(name)
    for info in attnx.backends():
        if info.name == name and info.status != "available":
            raise UnavailableBackend(f"{name}: {info.status}: {info.reason}")
    return subject


def run_trial(config: pytest.Config, name: str, trial: Trial) -> None:
    """Run one trial and end the test as its verdict says."""
    result = waive(_result(_subject(name), trial), _deviations(config))
    if result.verdict == "not-applicable":
        pytest.skip(result.detail)
    if result.verdict == "waived":
        pytest.xfail(result.detail)
    if not result.ok:
        told = f"{result.verdict} ({', '.join(result.clauses)}): {result.detail}"
        pytest.fail(f"{told}\n{result.command}", pytrace=False)


def _result(subject: BackendSubject, trial: Trial) -> Result:
    task = trial.task
    with subject.watched() as witness:
        answer = examine(subject, witness, *task[:5])
    return result_of(task, subject.name, subject.target, answer)


@cache
def _load(path: str) -> Any:
    return load(path)


def _deviations(config: pytest.Config) -> Any:
    path = config.getoption("--attnx-deviations")
    if not path:
        return ()
    try:
        return _load(path)
    except AttnxError as error:
        raise pytest.UsageError(str(error)) from None
