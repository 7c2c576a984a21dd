"""HTML by hand, with escaping as the default: what is not ``Markup`` is text and cannot become an element."""

from __future__ import annotations

import html


class Markup(str):
    """A string that is HTML already. Only this module and trusted drawing code make one."""

    __slots__ = ()


Child = str | Markup | None


def tag(name: str, *children: Child, **attributes: str | bool) -> Markup:
    """An element. Children that are not ``Markup`` are escaped, None is left out; ``class_`` means ``class``."""
    text = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{html.escape(str(value))}"')
        for key, value in attributes.items()
        if value is not False
    )
    return Markup(f"<{name}{text}>{join(*children)}</{name}>")


def join(*children: Child) -> Markup:
    """The children one after the other, escaped where they are not ``Markup``."""
    return Markup("".join(c if isinstance(c, Markup) else html.escape(c) for c in children if c is not None))
