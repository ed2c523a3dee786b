"""What is installed is what the project says: proven on the built wheel, not the checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "attnx",
    "attnx_numpy",
    "attnx_torch",
    "attnx_jax",
    "attnx_cupy",
    "attnx_bench",
    "attnx_conformance",
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that was built from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def wheel_names(built: Path) -> set[str]:
    (wheel,) = built.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the wheel's packages and nothing of the checkout."""
    (wheel,) = built.glob("*.whl")
    target = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(target)
    return target


def run_installed(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ATTNX_")}
    environment["PYTHONPATH"] = str(installed)
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=installed,
        env=environment,
        capture_output=True,
        text=True,
    )


def test_the_wheel_holds_exactly_the_import_packages(wheel_names: set[str]) -> None:
    top = {name.split("/")[0] for name in wheel_names}
    assert {name for name in top if not name.endswith(".dist-info")} == PACKAGES


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_every_import_package_is_typed(wheel_names: set[str], package: str) -> None:
    assert {f"{package}/__init__.py", f"{package}/py.typed"} <= wheel_names


def test_the_wheel_holds_the_licence_and_the_real_input(wheel_names: set[str]) -> None:
    assert any(name.endswith("licenses/LICENSE") for name in wheel_names)
    assert any(re.fullmatch(r"attnx/cli/data/.+\.(npz|safetensors)", n) for n in wheel_names)


@pytest.mark.parametrize("folder", ["attnx_conformance", "attnx/viz"])
def test_the_wheel_holds_the_pages(wheel_names: set[str], folder: str) -> None:
    page = {"page.html.j2", "page.css", "page.js"}
    assert {f"{folder}/_page/{name}" for name in page} <= wheel_names


def test_the_sdist_holds_only_what_is_listed(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        top = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]
    listed = set(hatch["build"]["targets"]["sdist"]["only-include"])
    always = {"PKG-INFO", "pyproject.toml", "README.md", "LICENSE", ".gitignore"}
    assert top <= listed | always
    assert {"attnx", "backends", "conformance", "tests", "docs", "conftest.py"} <= top


def test_the_built_wheel_computes_away_from_the_checkout(installed: Path) -> None:
    code = (
        "import attnx, attnx_numpy, attnx_conformance, numpy as np\n"
        "x = np.ones((4, 8), np.float32)\n"
        "assert np.array_equal(attnx.attention(x, x, x, causal=True), x)\n"
        "print(attnx.__file__, attnx_numpy.__file__, attnx_conformance.__file__, sep='\\n')\n"
    )
    done = run_installed(installed, "-c", code)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        assert Path(line).is_relative_to(installed)


def test_the_built_wheel_brings_the_command(installed: Path) -> None:
    done = run_installed(installed, "-m", "attnx", "--help")
    assert done.returncode == 0, done.stderr
    for command in ("backends", "explain", "compare", "doctor"):
        assert command in done.stdout


@pytest.mark.sweep
@pytest.mark.parametrize("base", ["array", "bare"])
def test_a_new_backend_installs_and_passes(base: str, built: Path, tmp_path: Path) -> None:
    """The author's afternoon: from the wheel, in an empty folder and an environment of its own."""
    (wheel,) = built.glob("*.whl")
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("ATTNX_", "PYTHON", "VIRTUAL"))
    }

    def ran(*command: object) -> str:
        done = subprocess.run(
            [*map(str, command)], cwd=tmp_path, env=kept, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    ran(sys.executable, "-m", "venv", "venv")
    tools = tmp_path / "venv" / ("Scripts" if sys.platform == "win32" else "bin")
    ran(tools / "python", "-m", "pip", "install", wheel)
    ran(tools / "attnx", "new-backend", "demo", "--base", base)
    ran(tools / "python", "-m", "pip", "install", "./attnx-demo")
    assert "attnx-demo 0.1.0" in ran(tools / "attnx", "backends")
    badge = tmp_path / "attnx-demo" / "badge.svg"
    shown = ran(tools / "attnx", "conformance", "demo", "--badge", badge)
    assert re.search(r"│ forward +│ held ", shown)
    assert ">passes 6 of 8 profiles, computes " in badge.read_text("utf-8")
    ran(tools / "python", "-m", "pip", "install", "-e", "./attnx-demo[test]")
    assert " passed, " in ran(tools / "pytest", "-q", "attnx-demo")


def test_our_backends_register_as_a_third_partys_would() -> None:
    registered = {point.name: point.value for point in entry_points(group="attnx")}
    ours = {"numpy": "attnx_numpy", "torch": "attnx_torch", "jax": "attnx_jax"}
    assert {**ours, "cupy": "attnx_cupy"}.items() <= registered.items()


def test_constraints_pin_every_dependency_without_a_local_tag() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pinned = {canonicalize_name(name): version for name, version in pins.items()}
    assert not [version for version in pinned.values() if "+" in version]

    wanted = list(PROJECT["dependencies"])
    for extra, requirements in PROJECT["optional-dependencies"].items():
        # CUDA 12 and 13 exclude each other; the checks use 13.
        wanted += requirements if extra != "cuda12" else []
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        if name != "attnx":
            assert name in pinned, f"constraints.txt has no {name}"
            assert requirement.specifier.contains(pinned[name]), requirement


def test_no_pytest_plugin_loads_unasked() -> None:
    assert "pytest11" not in PROJECT["entry-points"]


def test_pre_commit_fetches_nothing() -> None:
    text = (ROOT / ".pre-commit-config.yaml").read_text("utf-8")
    assert set(re.findall(r"repo: (\S+)", text)) == {"local"}
    assert set(re.findall(r"language: (\S+)", text)) == {"system"}


def test_ci_runs_the_commands_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    script = ROOT / ".ci" / "run"
    if not script.exists():
        pytest.skip("an sdist ships no .ci")
    called = re.findall(r"^run_readme (\S+)$", script.read_text("utf-8"), re.MULTILINE)
    assert called == ["compare", "test"]
    commands = dict(re.findall(r"<!-- command: (\S+) -->\n\n```sh\n(.*?)\n```", readme, re.DOTALL))
    assert set(commands) == set(called)
    assert "attnx compare" in commands["compare"]
    assert "-c constraints.txt" in commands["test"]
    assert os.access(script, os.X_OK)
