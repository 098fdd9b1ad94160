"""Builds the programs of `recipes.py` into the user's cache folder, if they are not there."""

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import recipes
from .recipes import ON_REQUEST, PAUSE_FOLDER, PAUSE_SOURCE, PROMETHEUS_FOLDER, RECIPES, Recipe

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agent-rollouts" / "cluster"


class BuildError(Exception):
    """A program could not be built; the text has its name and a remedy."""


def build_all(say: Callable[[str], None]) -> Path:
    """Returns the folder with all programs; builds missing ones. Raises BuildError."""
    folder = CACHE / recipes.cache_digest()
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with _lock(say):
            if not folder.exists():
                _install_debian_packages(say)
                _build_missing(say)
                _gather(folder)
    return programs_folder()


def build_one(name: str, say: Callable[[str], None]) -> Path:
    """Builds one program by the recipe of its name, for tests without a cluster. Raises BuildError."""
    recipe = next(recipe for recipe in (*RECIPES, *ON_REQUEST) if recipe.name == name)
    if not (CACHE / recipe.folder).exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with _lock(say):
            _build(recipe, say)
    return CACHE / recipe.folder / "bin" / name


def programs_folder() -> Path:
    """Returns the folder with the programs of `build_all`."""
    return CACHE / recipes.cache_digest() / "bin"


def share_folder() -> Path:
    """Returns the folder with the recipes' `share` files: one subfolder for each recipe."""
    return CACHE / recipes.cache_digest() / "share"


def _build(recipe: Recipe, say: Callable[[str], None]) -> None:
    if (CACHE / recipe.folder).exists():
        return
    if shutil.which("go") is None:
        raise BuildError(f"{recipe.name} is built with Go, which was not found; install Go 1.24 or newer")
    started = time.monotonic()
    say(f"building {recipe.name} {recipe.version}")
    with new_folder(CACHE / recipe.folder) as folder:
        _go_build(recipe, folder)
    say(f"built {recipe.name} in {time.monotonic() - started:.0f} s")


def _build_missing(say: Callable[[str], None]) -> None:
    # Two at a time: one downloads or links while the other compiles.
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda recipe: _build(recipe, say), RECIPES))
    for name, make in ((PAUSE_FOLDER, compile_pause), (PROMETHEUS_FOLDER, _unpack_prometheus)):
        if not (CACHE / name).exists():
            with new_folder(CACHE / name) as folder:
                make(folder)


def _gather(folder: Path) -> None:
    with new_folder(folder) as gathered:
        for kind in ("bin", "share"):
            (gathered / kind).mkdir()
        for source in recipes.all_folders():
            for kind in ("bin", "share"):
                for path in sorted((CACHE / source / kind).glob("*")):
                    (gathered / kind / path.name).symlink_to(path)


def _go_build(recipe: Recipe, folder: Path) -> None:
    environ = os.environ | {"CGO_ENABLED": "1" if recipe.cgo else "0", "GOFLAGS": "-mod=mod", "GOWORK": "off"}
    downloaded = json.loads(
        run(["go", "mod", "download", "-json", f"{recipe.module}@v{recipe.version}"], folder, environ)
    )
    staging = recipes.staging_modules(Path(downloaded["GoMod"]).read_text()) if recipe.staging else []
    (folder / "module").mkdir()
    (folder / "module" / "go.mod").write_text(recipes.module_file(recipe, staging))
    linker = " ".join(["-s", "-w", *(f"-X {variable}" for variable in recipe.variables)])
    for program, package in recipe.packages.items():
        command = ["go", "build", "-trimpath", "-buildvcs=false", "-tags", recipe.tags, "-ldflags", linker]
        run([*command, "-o", str(folder / "bin" / program), package], folder / "module", environ)
    for path in recipe.share:
        _copy(Path(downloaded["Dir"]) / path, folder / "share" / recipe.name / Path(path).name)
    shutil.rmtree(folder / "module")


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        # Without the modes: Go's module cache is read-only, and a read-only copy could not be removed.
        target.mkdir()
        for entry in source.iterdir():
            _copy(entry, target / entry.name)
    else:
        shutil.copyfile(source, target)


def compile_pause(folder: Path) -> None:
    """Writes `bin/pause` in the folder. Raises BuildError."""
    (folder / "bin").mkdir()
    source = folder / "pause.c"
    source.write_text(PAUSE_SOURCE)
    run(["gcc", "-Os", "-static", "-o", str(folder / "bin" / "pause"), str(source)], folder, os.environ)


def _unpack_prometheus(folder: Path) -> None:
    # Unpacked, not installed: Debian's package would start a Prometheus server on this machine.
    (folder / "bin").mkdir()
    run(["apt-get", "download", "-q", "prometheus"], folder, os.environ)
    for package in folder.glob("*.deb"):
        run(["dpkg-deb", "-x", str(package), str(folder / "unpacked")], folder, os.environ)
    for program in ("prometheus", "promtool"):
        shutil.move(folder / "unpacked" / "usr" / "bin" / program, folder / "bin" / program)
    shutil.rmtree(folder / "unpacked")


def _install_debian_packages(say: Callable[[str], None]) -> None:
    missing = [package for package, path in recipes.DEBIAN_PACKAGES.items() if not Path(path).exists()]
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise BuildError(f"missing: {', '.join(missing)} (Debian's names); install them, or run this as root on Debian")
    say(f"installing {', '.join(missing)}")
    environ = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    run(["apt-get", "update", "-qq"], CACHE, environ)
    run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing], CACHE, environ)


def run(command: list[str], folder: Path, environ: "os._Environ[str] | dict[str, str]") -> str:
    """Runs a command to its end; returns its output. Raises BuildError with the end of its output."""
    done = subprocess.run(command, cwd=folder, env=dict(environ), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"`{' '.join(command)}` failed with exit code {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


@contextlib.contextmanager
def new_folder(place: Path) -> Iterator[Path]:
    """Yields a folder that is moved to `place` on success, and removed otherwise."""
    folder = Path(tempfile.mkdtemp(prefix=".building-", dir=place.parent))
    try:
        folder.chmod(0o755)
        yield folder
        folder.rename(place)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _lock(say: Callable[[str], None]) -> Iterator[None]:
    with (CACHE / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another build of the same programs")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
