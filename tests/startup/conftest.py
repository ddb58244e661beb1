"""Fresh environments with the project installed as its users install it, over this environment's dependencies."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlx_lm_tiered import openblas

PROJECT = Path(__file__).resolve().parents[2]
SCRIPTS = ("mlx_lm", "mlx_lm.server", "mlx_lm.generate", "mlx_lm.chat")
sys.path.insert(0, str(PROJECT / "tests" / "seams"))

import witness  # noqa: E402


@dataclass
class Environment:
    """A virtual environment; commands run in an empty folder."""

    path: Path
    folder: Path
    witness: Path

    @property
    def python(self) -> str:
        return str(self.path / "bin" / "python")

    def form(self, form: str, command: str) -> list[str]:
        """One of the four ways to start upstream's `command`."""
        return {
            "script": [str(self.path / "bin" / f"mlx_lm.{command}")],
            "subcommand": [str(self.path / "bin" / "mlx_lm"), command],
            "package": [self.python, "-m", "mlx_lm", command],
            "module": [self.python, "-m", f"mlx_lm.{command}"],
        }[form]

    def environ(self, **more: str) -> dict[str, str]:
        """The environment of its processes: the tests' own settings of Python and plugins do not reach them."""
        drop = ("PYTHON", "MLX_LM_", "WITNESS_")
        result = {k: v for k, v in openblas.preload_environment(os.environ).items() if not k.startswith(drop)}
        return {**result, "PYTHONPATH": str(self.witness), "COLUMNS": "100", **more}

    def run(self, argv: Sequence[str], *, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            argv, cwd=self.folder, env=self.environ(**env), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
        )
        assert not check or done.returncode == 0, f"{argv} exited {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done


@pytest.fixture(scope="session")
def make_environment(tmp_path_factory: pytest.TempPathFactory):
    """A function that makes an environment with what `requirement` (pip's words; none: nothing) installs."""
    tools = tmp_path_factory.mktemp("tools")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", "--target", str(tools), "hatchling>=1.27", "hatch-vcs>=0.4", "editables"], check=True)
    plugin = witness.install(tmp_path_factory.mktemp("witness") / "lib")

    def make(name: str, *requirement: str) -> Environment:
        root = tmp_path_factory.mktemp(name)
        path = root / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True)
        python = str(path / "bin" / "python")
        if requirement:
            # This environment's own PYTHONPATH is for the build backend alone.
            options = ["--no-deps", "--no-build-isolation"]
            subprocess.run(
                [*pip, "--python", python, "install", *options, *requirement],
                check=True,
                env={**os.environ, "PYTHONPATH": str(tools)},
            )
        purelib = subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], check=True, capture_output=True, text=True
        ).stdout.strip()
        # A folder named in a .pth file is searched, but its own .pth files are not run: an editable install here stays hidden.
        (Path(purelib) / "zz_dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        for script in SCRIPTS:
            lines = (Path(sysconfig.get_path("scripts")) / script).read_text(encoding="utf-8").splitlines(keepends=True)
            target = path / "bin" / script
            target.write_text(f"#!{python}\n" + "".join(lines[1:]), encoding="utf-8")
            target.chmod(0o755)
        folder = root / "folder"
        folder.mkdir()
        return Environment(path, folder, plugin)

    make.tools = tools  # type: ignore[attr-defined]
    return make


@pytest.fixture(scope="session")
def sdist(make_environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's source, as it is released."""
    out = tmp_path_factory.mktemp("sdist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(out)],
        check=True,
        cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": str(make_environment.tools)},
    )
    (path,) = out.glob("*.tar.gz")
    return path


@pytest.fixture(scope="session")
def wheel(make_environment, sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, made of its released source."""
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "wheel"]
        + ["--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(sdist)],
        check=True,
        env={**os.environ, "PYTHONPATH": str(make_environment.tools)},
    )
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def from_wheel(make_environment, wheel: Path) -> Environment:
    return make_environment("wheel-env", str(wheel))


@pytest.fixture(scope="session")
def editable(make_environment) -> Environment:
    return make_environment("editable-env", "--editable", str(PROJECT))


@pytest.fixture(scope="session")
def stock(make_environment) -> Environment:
    """Upstream without the plugin."""
    return make_environment("stock-env")


@pytest.fixture(scope="session", params=["wheel", "editable"])
def installed(request: pytest.FixtureRequest) -> Environment:
    return request.getfixturevalue({"wheel": "from_wheel", "editable": "editable"}[request.param])
