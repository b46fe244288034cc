"""Functions that compare two passages, as a user would write them in a file of their own."""

import time


def more_letters(query: str, first: str, second: str) -> float:
    """The passage with more of the query's letters wins."""
    letters = set(query.casefold())
    return float(
        sum(c in letters for c in first.casefold()) - sum(c in letters for c in second.casefold())
    )


def slow_letters(query: str, first: str, second: str) -> float:
    """The same, a moment later."""
    time.sleep(0.002)
    return more_letters(query, first, second)
