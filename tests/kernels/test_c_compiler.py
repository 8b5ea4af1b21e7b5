"""C sources become a library once, for this compiler and CPU; without a compiler the reason is told."""

import os
import stat
from pathlib import Path

import pytest

from pliant.kernels import c_compiler
from pliant.kernels.c_compiler import CompilerError, compiler, library

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "number.h").write_text("#define NUMBER 6\n")
    (tmp_path / "answer.c").write_text('#include "number.h"\nint answer(int x) { return NUMBER * x; }\n')
    return tmp_path / "answer.c"


def libraries(cache: Path) -> list[Path]:
    return sorted(cache.glob("libraries/*/library.so"))


@needs_compiler
def test_a_library_is_compiled_once(source: Path, cache: Path) -> None:
    assert library([source]).answer(7) == 42
    (compiled,) = libraries(cache)
    before = compiled.stat().st_mtime_ns
    assert library([source]).answer(8) == 48
    assert [path.stat().st_mtime_ns for path in libraries(cache)] == [before]


@needs_compiler
@pytest.mark.parametrize("changed", ["answer.c", "number.h"])
def test_another_text_is_another_library(source: Path, cache: Path, changed: str) -> None:
    library([source])
    text = source.with_name(changed).read_text()
    source.with_name(changed).write_text(text.replace("NUMBER * x", "x").replace("NUMBER 6", "NUMBER 5"))
    assert library([source]).answer(7) != 42
    assert len(libraries(cache)) == 2


@needs_compiler
def test_other_options_are_another_library(source: Path, cache: Path) -> None:
    library([source])
    library([source], ["-DOTHER"])
    assert len(libraries(cache)) == 2


@needs_compiler
def test_what_the_compiler_says_is_told(source: Path, cache: Path) -> None:
    source.write_text("int answer(int x) { return undeclared; }\n")
    with pytest.raises(CompilerError, match=r"failed: .*answer\.c"):
        library([source])
    assert not libraries(cache)


@needs_compiler
def test_a_library_that_cannot_be_loaded_says_where_it_is(source: Path, cache: Path) -> None:
    folder = cache / "libraries"
    library([source])
    (compiled,) = libraries(cache)
    other = source.with_name("other.c")
    other.write_text("int missing(void); int answer(void) { return missing(); }\n")
    with pytest.raises(CompilerError, match=f"{folder}/other-.* cannot be loaded"):
        library([other], ["-Wl,-z,now"])
    assert compiled.exists()


def test_no_compiler_is_an_error_that_says_what_to_install(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert compiler() is None
    with pytest.raises(CompilerError, match="install one"):
        library([source])


def test_the_environment_names_the_compiler(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "my-cc"
    mine.write_text("#!/bin/sh\necho mine says no >&2\nexit 3\n")
    mine.chmod(mine.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(mine))
    monkeypatch.setenv("PATH", os.defpath)
    assert c_compiler.compiler() == str(mine)
    with pytest.raises(CompilerError, match="mine says no"):
        library([source])
