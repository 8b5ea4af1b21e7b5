"""What a stage found, in one JSON file that is written anew after each part: what a limit cuts off leaves the rest."""

from __future__ import annotations

import json
import platform
import subprocess
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "triton", "transformers", "numpy", "ray", "pydantic")


def versions() -> dict[str, str]:
    """Of Python and of the packages that figures depend on, those that are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit of these sources, with "-dirty" if they were changed since; "unknown" where git cannot say."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


class Record:
    """One stage's JSON: `figures` are numbers by name, `tables` what they are made of, `skipped` and `errors` reasons
    by part."""

    def __init__(self, file: Path, stage: str, command: str, device: dict[str, Any]) -> None:
        self._file = file
        self._facts = {
            "stage": stage,
            "commit": commit(),
            "versions": versions(),
            "device": device,
            "command": command,
        }
        self.figures: dict[str, float] = {}
        self.tables: dict[str, Any] = {}
        self.skipped: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self.save()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of the stage, whose failure is noted and leaves the others to run. One that wants a package that is
        not installed is skipped."""
        try:
            yield
        except ModuleNotFoundError as missing:
            if (missing.name or "").startswith("pliant"):
                self.errors[name] = traceback.format_exc()
            else:
                self.skipped[name] = f"{missing.name} is not installed"
        except Exception:
            self.errors[name] = traceback.format_exc()
        finally:
            self.save()

    def save(self) -> None:
        """Write what there is, all or nothing."""
        content = {
            **self._facts,
            "figures": self.figures,
            "tables": self.tables,
            "skipped": self.skipped,
            "errors": self.errors,
        }
        unfinished = self._file.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(content, indent=1) + "\n")
        unfinished.replace(self._file)


def end_early(file: Path, stage: str, command: str, reason: str) -> None:
    """Note in the stage's JSON, made if there is none, why its process did not come to its end."""
    if not file.exists():
        Record(file, stage, command, {})
    content = json.loads(file.read_text())
    content["errors"]["stage"] = reason
    file.write_text(json.dumps(content, indent=1) + "\n")
