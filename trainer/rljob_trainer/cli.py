"""``rljob VERB ...``: finds the verb's module and imports nothing else, so that quick verbs are quick.

A verb is a module with ``add_arguments(parser)`` and ``run(args) -> exit code``; its docstring becomes its help.
Verbs of other packages come through entry points of the group ``rljob.commands``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.abc import InspectLoader
from typing import Protocol, TextIO, cast

from rljob_api.violations import JobInvalid
from rljob_trainer.errors import NO_ROOM, JobFileError, RLJobError, exit_code_of, lacks_room
from rljob_trainer.secret_values import masked

VERBS = {
    "run": ("rljob_trainer.commands.run", "train a job on this machine"),
    "validate": ("rljob_trainer.commands.validate", "list every mistake in a job file"),
    "explain": ("rljob_trainer.commands.explain", "describe a field of the job file"),
    "plan": ("rljob_trainer.commands.plan", "predict step time, idle time and sample age for different pool sizes"),
    "drive": ("rljob_trainer.commands.drive", "train a job on a Ray cluster (started by the operator on the head pod)"),
    "status": ("rljob_trainer.commands.status", "show what a run is waiting for and where its time went"),
    "eval": ("rljob_trainer.commands.eval", "run a job's validation on a model or checkpoint"),
    "export": ("rljob_trainer.commands.export", "write a run's model as a Hugging Face folder"),
}
"""Module and one-line help of each verb (the help stands here so that the list needs no import)."""

EXTRAS: Mapping[str, frozenset[str]] = {
    "trainer": frozenset(
        (
            "aiohttp",
            "datasets",
            "fsspec",
            "huggingface_hub",
            "jinja2",
            "math_verify",
            "numpy",
            "psutil",
            "pyarrow",
            "ray",
        )
    )
    | {"rich", "s3fs", "safetensors", "tensorboard", "tokenizers", "torch", "transformers"},
    "operator": frozenset({"kopf", "prometheus_client"}),
    "cpu": frozenset({"vllm"}),
    "wandb": frozenset({"wandb"}),
    "mlflow": frozenset({"mlflow"}),
}
"""The modules that each extra of the package brings: what ``pip install rljob`` alone leaves out."""
_TOGETHER = {"trainer": "trainer,cpu", "cpu": "trainer,cpu"}
"""What is installed to train; on machines with GPUs ``gpu`` takes the place of ``cpu``."""

GROUP = "rljob.commands"
USAGE_ERROR = 2
INTERRUPTED = 130


class Command(Protocol):
    """A verb's module."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the process's exit code."""
    _give_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    verb, *rest = arguments or ["--help"]
    if verb in ("-h", "--help", "help"):
        if rest and verb == "help":
            return main([rest[0], "--help"])
        print(_overview())
        return 0 if arguments else USAGE_ERROR
    if verb in ("-V", "--version"):
        print(f"rljob {_version()}")
        return 0
    try:
        command = _command(verb)
    except ModuleNotFoundError as error:
        return _lacking(verb, error)
    if command is None:
        print(_unknown(verb), file=sys.stderr)
        return USAGE_ERROR
    summary, _, details = (command.__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog=f"rljob {verb}",
        description=summary,
        epilog=details.strip() or None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    try:
        code = command.run(parser.parse_args(rest))
        sys.stdout.flush()  # here, where a reader that has gone is an error like others
        return code
    except RLJobError as error:
        print(f"rljob {verb}: {masked(str(error))}", file=sys.stderr)
        return exit_code_of(error)
    except JobInvalid as error:
        print(f"rljob {verb}: the job file is invalid:\n{masked(str(error))}", file=sys.stderr)
        return JobFileError.exit_code
    except ModuleNotFoundError as error:
        return _lacking(verb, error)
    except KeyboardInterrupt:
        print(f"rljob {verb}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if not lacks_room(error):
            raise
        if error.filename is None and _is_full(sys.stdout):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # as above
            print(
                f"rljob {verb}: cannot write to standard output ({error.strerror}); free space where it goes",
                file=sys.stderr,
            )
            return NO_ROOM
        where = f" in {' and '.join(full)}" if error.filename is None and (full := _full_folders()) else ""
        print(f"rljob {verb}: {error}; make room{where}", file=sys.stderr)
        return NO_ROOM


def _full_folders() -> list[str]:
    """Which places that everybody writes into have no room left: an error in the middle of a write names none."""
    found = []
    for folder in dict.fromkeys((os.environ.get("TMPDIR", "/tmp"), "/tmp", "/dev/shm", os.curdir)):
        with suppress(OSError):
            disk = os.statvfs(folder)
            if disk.f_bavail == 0 or (disk.f_files and disk.f_favail == 0):
                found.append(os.path.abspath(folder))
    return found


def _is_full(stream: TextIO) -> bool:
    """Whether there is no room for one more line; the error itself does not say which file it comes from."""
    try:
        print(file=stream, flush=True)
    except OSError as error:
        return lacks_room(error)
    return False


def _give_streams() -> None:
    """A process may be started without standard streams (``>&-``). Files that it opens would take their numbers, and
    what it or one of its children prints would be written into them."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115


def _command(verb: str) -> Command | None:
    if verb in VERBS:
        return cast(Command, importlib.import_module(VERBS[verb][0]))
    from importlib.metadata import entry_points

    for entry in entry_points(group=GROUP, name=verb):
        return cast(Command, entry.load())
    return None


def _lacking(verb: str, error: ModuleNotFoundError) -> int:
    """Says which extra of the package brings a module that is missing. Raises ``error`` for one that none does."""
    module = (error.name or "").partition(".")[0]
    extra = next((extra for extra, modules in EXTRAS.items() if module in modules), None)
    if extra is None:
        raise error
    print(
        f"rljob {verb}: the module {module} is not installed; install the extra {extra}: "
        f"pip install 'rljob[{_TOGETHER.get(extra, extra)}]'",
        file=sys.stderr,
    )
    return RLJobError.exit_code


def _helps() -> dict[str, str]:
    from importlib.metadata import entry_points

    others = {entry.name: _first_sentence(entry.module) for entry in entry_points(group=GROUP)}
    return {name: text for name, (_, text) in VERBS.items()} | others


def _first_sentence(module: str) -> str:
    """The first sentence of a module's docstring, as the list of verbs has it. The module is read and not run: others
    may be slow."""
    import ast
    from importlib.util import find_spec

    spec = find_spec(module)
    source = spec.loader.get_source(module) if spec and isinstance(spec.loader, InspectLoader) else None
    first = (ast.get_docstring(ast.parse(source or "")) or f"from {module}").partition("\n")[0].rstrip(".")
    return first[:1].lower() + first[1:]


def _overview() -> str:
    helps = _helps()
    width = max(map(len, helps)) + 2
    lines = [
        "usage: rljob VERB ...",
        "",
        "Reinforcement learning for language models, described in one file.",
        "",
        *(f"  {name:<{width}}{text}" for name, text in helps.items()),
        "",
        "`rljob VERB --help` describes a verb; `rljob --version` prints the version.",
    ]
    return "\n".join(lines)


def _unknown(verb: str) -> str:
    import difflib

    helps = _helps()
    close = difflib.get_close_matches(verb, helps, n=1)
    hint = f"did you mean {close[0]}?" if close else f"use one of {', '.join(helps)}"
    return f"rljob: unknown verb {verb!r}; {hint}"


def _version() -> str:
    from importlib.metadata import version

    return version("rljob")


if __name__ == "__main__":
    sys.exit(main())
