"""Runs the tests once with the lowest or the highest versions that pyproject.toml allows, in an environment of its own.

    python tools/dependency_range.py lowest FOLDER [--python python3.10] [--log FILE] [-- pytest arguments]

`lowest` pins every requirement to the bound after `>=`; `highest` lets pip take the newest that the ranges admit. The
environment in FOLDER is made once and used again. The log begins with the versions that were installed and ends with what
pytest said last; its exit code is that of pytest.
"""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

HERE = Path(__file__).resolve().parent.parent
# What the tests need beside k3tool. The packages that serve as oracles are taken at their newest: they are not k3tool's
# dependencies, and where an old set refuses them the tests that need them are left out by name.
EXTRAS = ("test",)
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_LOWEST = re.compile(r">=\s*([0-9][0-9a-z.]*)")


def requirements(extras: tuple[str, ...] = EXTRAS) -> list[str]:
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    return wanted


def lowest(requirement: str) -> str:
    """`numpy>=1.26; marker` as `numpy==1.26; marker`. A requirement without a lower bound stays as it is."""
    text, _, marker = requirement.partition(";")
    name, bound = _NAME.match(text.strip()), _LOWEST.search(text)
    if name is None or bound is None:
        return requirement
    return f"{name[0]}=={bound[1]}" + (f"; {marker.strip()}" if marker else "")


def install(folder: Path, which: str, python: str) -> Path:
    """The interpreter of an environment with these versions; made where it is not there yet."""
    interpreter = folder / "bin" / "python"
    ready = folder / "ready"
    if ready.is_file() and ready.read_text() == which:
        return interpreter
    subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [str(interpreter), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    wanted = requirements()
    subprocess.run([*pip, *([lowest(each) for each in wanted] if which == "lowest" else wanted)], check=True)
    subprocess.run([*pip, "setuptools>=77"], check=True)
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "-e", str(HERE)], check=True)
    ready.write_text(which)
    return interpreter


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=("lowest", "highest"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--log", type=Path)
    words, pytest = sys.argv[1:], []
    if "--" in words:
        cut = words.index("--")
        words, pytest = words[:cut], words[cut + 1 :]
    options = parser.parse_args(words)
    interpreter = install(options.folder.absolute(), options.which, options.python)
    versions = subprocess.run(
        [str(interpreter), "-m", "pip", "--disable-pip-version-check", "freeze", "--exclude-editable"],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    log = options.log or options.folder / f"{options.which}.log"
    with open(log, "w") as file:
        file.write(f"{platform.platform()}\n{versions}\n")
        file.flush()
        done = subprocess.run([str(interpreter), "-m", "pytest", *pytest], cwd=HERE, stdout=file, stderr=file)
    print(f"{log}: pytest left with {done.returncode}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
