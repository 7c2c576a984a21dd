"""What the files of a tokenizer say, read without transformers: its size, its special tokens, its chat template.

``rljob validate`` has no time to load a tokenizer the way a run does, and whatever is wrong with these files would end
a run in a traceback of whichever library stumbles over it first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljob_trainer.errors import JobFileError
from rljob_trainer.models.config import read_json, wrong

if TYPE_CHECKING:
    import jinja2

SETTINGS, FAST = "tokenizer_config.json", "tokenizer.json"
_ANY = (FAST, "tokenizer.model", "vocab.json", "vocab.txt")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
COPY = "copy the tokenizer's files again"


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What is known of a tokenizer by its files."""

    folder: Path
    size: int | None
    """One more than the highest token id; None for kinds whose files only transformers reads."""
    ids: dict[str, int]
    """Ids of the end and padding tokens, by ``eos_token`` and ``pad_token``, as far as the files say."""
    has_chat_template: bool
    fills_empty: bool | None
    """Whether an empty text has tokens: one that begins every text."""
    chat_template: str | None = None
    """Its text; None also where there are several, and transformers chooses."""
    special: Mapping[str, str] = field(default_factory=dict)
    """The texts of special tokens, by ``bos_token`` and so on, as far as the settings say."""


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in _ANY)


def read_tokenizer(folder: Path, *, of_model: bool = True) -> TokenizerFiles:
    """``of_model`` False: the job names the folder for its tokenizer. Raises ``JobFileError`` naming the file, and the
    field in it, that is wrong."""
    if not has_tokenizer(folder):
        another = "set spec.model.tokenizer" if of_model else "use another folder"
        raise JobFileError(
            f"{folder} has no tokenizer (tokenizer.json ...); copy the model's tokenizer files there or {another}"
        )
    settings = read_json(folder / SETTINGS) if (folder / SETTINGS).exists() else {}
    special = _special_tokens(settings, folder / SETTINGS)
    for name in ("special_tokens_map.json", "added_tokens.json"):
        if (folder / name).exists():
            read_json(folder / name)
    has_template, template = _chat_template(folder, settings)
    if not (folder / FAST).exists():
        return TokenizerFiles(folder, None, {}, has_template, None, template, special)
    tokenizer = _backend(folder / FAST)
    known = tokenizer.get_vocab(with_added_tokens=True)
    if not known:
        raise JobFileError(f"{folder / FAST}: model.vocab has no tokens; {COPY}")
    _added_tokens(settings, folder / SETTINGS)
    # Special tokens that no text and no answer has (an image's, a padding that was added) need no row: many a tokenizer
    # that belongs to its model has some beyond the embedding's last.
    unused = {
        number
        for number, token in tokenizer.get_added_tokens_decoder().items()
        if token.special and token.content != special.get("eos_token")
    }
    highest = max((number for number in known.values() if number not in unused), default=0)
    try:
        around = tokenizer.encode("").ids
        ids = [*around, *tokenizer.encode("0").ids]
    except Exception as problem:
        raise JobFileError(f"{folder / FAST} cannot encode text ({problem}); {COPY}") from problem
    return TokenizerFiles(
        folder,
        max([highest, *ids]) + 1,
        {name: known[special[name]] for name in ("eos_token", "pad_token") if special.get(name) in known},
        has_template,
        bool(around),
        template,
        special,
    )


def check_size(tokenizer: TokenizerFiles, vocabulary: int, field: str) -> None:
    """Raises ``JobFileError`` when a token of it would have no row in the embedding."""
    if tokenizer.size is not None and tokenizer.size > vocabulary:
        raise too_large(tokenizer.size, vocabulary, f"{field}: the tokenizer in {tokenizer.folder}")


def too_large(size: int, vocabulary: int, which: str) -> JobFileError:
    return JobFileError(
        f"{which} has {size} tokens, but the model's embedding has only {vocabulary} rows (vocab_size in config.json); "
        "use the tokenizer that belongs to the model"
    )


def _backend(file: Path) -> Any:
    from tokenizers import Tokenizer

    read_json(file)  # says more about text that is no JSON
    try:
        return Tokenizer.from_file(str(file))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as problem:  # noqa: BLE001
        # The library raises bare Exception, and something that is not even one where its own code gives up.
        raise JobFileError(f"{file} is not a readable tokenizer ({problem}); {COPY}") from None


def _special_tokens(settings: dict[str, Any], file: Path) -> dict[str, str]:
    found = {}
    for name in _SPECIAL:
        token = settings.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if content is None and not isinstance(token, dict):
            continue
        if not isinstance(content, str) or not content:
            raise wrong(file, name, "a token's text", token)
        found[name] = content
    return found


def _added_tokens(settings: dict[str, Any], file: Path) -> dict[str, int]:
    listed = settings.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict):
        raise wrong(file, "added_tokens_decoder", "an object", listed)
    added = {}
    for number, token in listed.items():
        content = token.get("content") if isinstance(token, dict) else None
        if not (number.isascii() and number.isdigit()) or not isinstance(content, str):
            raise wrong(file, f"added_tokens_decoder.{number}", "a token under its number", token)
        added[content] = int(number)
    return added


def _chat_template(folder: Path, settings: dict[str, Any]) -> tuple[bool, str | None]:
    """Whether there is one, and its text if there are not several. Raises ``JobFileError`` for one that cannot be
    read."""
    own = folder / "chat_template.jinja"
    if own.exists():
        try:
            text = own.read_bytes().decode("utf-8")
        except UnicodeDecodeError as problem:
            raise JobFileError(f"{own} is not UTF-8 text (byte {problem.start}); save it as UTF-8") from problem
        check_template(text, str(own))
        return True, text
    said = settings.get("chat_template")
    if said is None and (folder / "chat_template.json").exists():
        settings, said = {}, read_json(folder / "chat_template.json").get("chat_template")
    if said is None:
        return False, None
    file = folder / SETTINGS
    templates = (
        [entry.get("template") if isinstance(entry, dict) else None for entry in said]
        if isinstance(said, list)
        else [said]
    )
    if not all(isinstance(template, str) for template in templates) or not templates:
        raise wrong(file, "chat_template", "a template's text", said)
    for template in templates:
        check_template(str(template), f"{file}: chat_template")
    return True, said if isinstance(said, str) else None


def check_template(text: str, place: str) -> None:
    """Raises ``JobFileError`` for what is no Jinja template. ``place`` is what messages call it."""
    from jinja2 import TemplateError

    try:
        _compiled(text)
    except (TemplateError, RecursionError) as problem:
        line = getattr(problem, "lineno", None)
        where = f"line {line}: " if line else ""
        raise JobFileError(
            f"{place} is not a Jinja template ({where}{problem or type(problem).__name__}); correct it"
        ) from None


def rendered(text: str, messages: Sequence[Mapping[str, Any]], special: Mapping[str, str]) -> str:
    """What the chat template ``text`` makes of a conversation that the model is to go on with. Raises what it raises.

    ``special``: texts of special tokens; those that are not known are empty.
    """
    known = {**dict.fromkeys(_SPECIAL, ""), **special}
    return _compiled(text).render(messages=messages, tools=None, documents=None, add_generation_prompt=True, **known)


@lru_cache(maxsize=8)
def _compiled(text: str) -> jinja2.Template:
    """With what transformers offers to templates beside Jinja's own."""
    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}``, by which templates mark what the model says, as transformers has it."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(text)
