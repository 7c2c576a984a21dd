"""A module of rewards that needs a package which is nowhere."""

import no_such_package  # type: ignore[import-not-found]


def score(response: str) -> float:
    return float(no_such_package.score(response))
