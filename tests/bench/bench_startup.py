"""Times what a user waits for before anything happens: ``prf --help`` and ``import prf``.

Each in a fresh process, repetitions alternating; Python's own start is the first row.

    python tests/bench/bench_startup.py [repetitions]
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROWS = {
    "python -c pass": ["-c", "pass"],
    "import prf": ["-c", "import prf"],
    "import prf, first stage": ["-c", "import prf; prf.Rocchio"],
    "prf --help": ["-m", "prf", "--help"],
}
LIMITS = {"import prf": 1.0, "prf --help": 0.5}


def main() -> None:
    """Prints one line per row: median, best, and the limit where there is one."""
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else 11
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    times: dict[str, list[float]] = {name: [] for name in ROWS}
    for repetition in range(repetitions + 1):
        for name, arguments in ROWS.items():
            start = time.perf_counter()
            subprocess.run(
                [sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=environment
            )
            if repetition:  # the first one fills the file cache
                times[name].append(time.perf_counter() - start)
    base = statistics.median(times["python -c pass"])
    load = os.getloadavg()[0]
    print(f"{repetitions} repetitions, {os.cpu_count()} hardware threads, load {load:.1f}")
    print(f"{'':28}{'median s':>10}{'best s':>10}{'of python':>11}{'limit s':>9}")
    for name, values in times.items():
        median = statistics.median(values)
        limit = f"{LIMITS[name]:9.1f}" if name in LIMITS else ""
        print(f"{name:28}{median:10.3f}{min(values):10.3f}{median / base:11.1f}{limit}")


if __name__ == "__main__":
    main()
