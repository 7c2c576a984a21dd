"""Methods by name: how a job file's `estimator: grpo` finds its function and hands it its settings.

A method is one function with a decorator. Its keyword-only parameters are its settings in the job file (snake_case;
a Python keyword such as `lambda` gets a trailing underscore), their defaults are the vetted values. Adding a method
touches the file of its family and a test: `make generate` writes the tables of `rljob_api` from what is registered.
"""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Method(Generic[T]):
    """A registered function: its name, the facts that validation needs, and a call that checks settings."""

    name: str
    function: Callable[..., T]

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Names of the settings and their defaults (``inspect.Parameter.empty`` where one must be given)."""
        parameters = inspect.signature(self.function).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}

    def bind(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The settings as keyword arguments. Raises ``ValueError`` for an unknown or a missing one."""
        bound = {f"{name}_" if keyword.iskeyword(name) else name: value for name, value in given.items()}
        known = ", ".join(self.settings) or "none"
        for name in bound:
            if name not in self.settings:
                raise ValueError(f"{self.name} has no setting {name!r}; its settings are: {known}")
        for name, default in self.settings.items():
            if default is inspect.Parameter.empty and name not in bound:
                raise ValueError(f"{self.name} needs the setting {name!r}; its settings are: {known}")
        return bound

    def __call__(self, *args: Any, **settings: Any) -> T:
        return self.function(*args, **self.bind(settings))


M = TypeVar("M", bound=Method[Any])


class Registry(Mapping[str, M]):
    """Methods of one kind. An unknown name is a ``ValueError`` that lists the known ones."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._methods: dict[str, M] = {}

    def add(self, method: M) -> M:
        if method.name in self._methods:
            raise ValueError(f"there are two definitions of the {self.kind} {method.name!r}")
        self._methods[method.name] = method
        return method

    def __getitem__(self, name: str) -> M:
        try:
            return self._methods[name]
        except KeyError:
            raise ValueError(f"there is no {self.kind} {name!r}; use one of: {', '.join(self)}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._methods

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._methods))

    def __len__(self) -> int:
        return len(self._methods)
