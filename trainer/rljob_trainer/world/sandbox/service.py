"""Programs at a service with SandboxFusion's interface, which contains and limits them in its own way.

A program is one ``POST URL/run_code`` (https://bytedance.github.io/SandboxFusion/docs/api/run-code-run-code-post). The
service is told how long it may run; memory, processes and what holds it are the service's own. What it answers becomes
the result that a sandbox on this machine would give: rewards and tools make no difference.

A service that fails, is busy or away says nothing of the program: it is asked again, later each time, until a deadline,
and meanwhile the wait has a name. Nothing is lost by that, since every program is a fresh one. Some programs break a
service, though: one that it fails with several times, and once more right after it has run another, is refused as what
it does not take. Else it would end every run in which a model writes it.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import logging
import random
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp

from rljob_trainer.errors import JobFileError
from rljob_trainer.waits import Waits
from rljob_trainer.world.protocol import WorldGoneError
from rljob_trainer.world.sandbox.keeper.protocol import SandboxLimits, encoded
from rljob_trainer.world.sandbox.protocol import NO_FILES, ProgramResult, check_program, outcome_of

AT_ONCE = 16
"""Programs, unless the job says so itself."""
_GRACE_SECONDS = 60.0
"""Beyond a program's own time, until the service's answer is no longer waited for: it may have a queue."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 15.0
_SUSPECT = 4
"""Failures that may be a program's doing, after which another one is tried, and then it once more."""
_LATER = frozenset({408, 409, 425, 429, 502, 503, 504})
"""It is busy, or not there: nothing is said of the program."""
_OF_THE_PROGRAM = frozenset({400, 413, 422})
_SHOWN = 300
_ENDED_BY_FORCE = -9
_WORKS, _SAYS = "print(6 * 7)", "42\n"
_LEAST_LEFT = 0.05
"""Seconds until the deadline with which there is no further try."""
log = logging.getLogger(__name__)


class _AwayError(Exception):
    """The service does not run the program now."""

    def __init__(self, problem: str, *, perhaps_its_doing: bool = False, seconds: float = 0.0) -> None:
        """``perhaps_its_doing``: the program may be why. ``seconds``: how long the service wants to be left alone."""
        super().__init__(problem)
        self.perhaps_its_doing, self.seconds = perhaps_its_doing, seconds


class _RefusedError(Exception):
    """It answers that it will not: the address is another's, or wants a key."""


@dataclass(slots=True)
class _Asking:
    """A program that the service has failed with so far."""

    since: float
    tries: int = 0
    suspicious: int = 0
    """Failures that may be its doing, since another program was last tried."""
    timeouts: int = 0
    problem: str = ""


class SandboxService:
    """A sandbox whose programs run elsewhere. A call that is cancelled leaves its program to the service's limits."""

    def __init__(
        self,
        url: str,
        place: str,
        limits: SandboxLimits,
        at_once: int | None = None,
        deadline_seconds: float = 600.0,
        waits: Waits | None = None,
    ) -> None:
        """``place``: the path in the job file. Of ``limits`` wall time, output, memory and the size of files are
        heeded, memory by the service."""
        self._url = f"{url.rstrip('/')}/run_code"
        self._name = f"the sandbox at {url}"
        self._place = place
        self._limits = limits
        self._seconds = deadline_seconds
        self._waits = waits or Waits()
        self._connections = at_once or AT_ONCE
        self._free = asyncio.Semaphore(self._connections)
        self._session: aiohttp.ClientSession | None = None
        self._gives = limits.output_bytes + 1
        """Bytes of output from which on it is not known whether there was more."""
        self._has_run = False
        self._asking: dict[int, _Asking] = {}
        self._numbers = itertools.count()
        self._waiting = ExitStack()

    async def __aenter__(self) -> Self:
        """Has the service run a program of one line, and waits for that as long as for any other.

        Raises ``JobFileError`` where something else answers, and ``WorldGoneError`` where nothing does. A service that
        begins may need longer than a program has, or be closed for the moment, and is asked again.
        """
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._connections), cookie_jar=aiohttp.DummyCookieJar()
        )
        try:
            await self._look_at_it()
        except BaseException:
            await self._close()
            raise
        return self

    async def _look_at_it(self) -> None:
        """What answers there runs programs, and gives what they print up to some length."""
        wanted = self._limits.output_bytes
        source = f"{_WORKS}\nprint('x' * {wanted - len(_SAYS)}, end='')"
        try:
            said = await self._asked_until_the_deadline(source, "", NO_FILES, first=True)
        except (_RefusedError, ValueError) as error:
            raise JobFileError(
                f"{self._place}.url: the service at {self._url} does not run programs: {error}. Use the address of a "
                "service with SandboxFusion's interface, without /run_code"
            ) from None
        if not said.succeeded or not said.stdout.startswith(_SAYS) or said.stdout[len(_SAYS) :].strip("x"):
            raise JobFileError(
                f"{self._place}.url: {_WORKS} ended unexpectedly at {self._url}: {said.outcome}, exit code "
                f"{said.exit_code}, {_shown(said.stdout)} {_shown(said.stderr)}"
            )
        if len(said.stdout) < wanted:
            self._gives = len(said.stdout)
            log.warning(
                "%s returns at most %d bytes of output: a program that prints as much counts as exceeding the limit "
                "of %d bytes",
                *(self._name, self._gives, wanted),
            )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    @property
    def not_contained(self) -> tuple[str, ...]:
        """Nothing is known of it."""
        return ()

    @property
    def told(self) -> str:
        """Nothing is known of its packages and network."""
        return ""

    async def run(self, source: str, stdin: str = "", files: Mapping[str, str] = NO_FILES) -> ProgramResult:
        """Runs a program as ``Sandbox.run`` says. Raises ``WorldGoneError`` at the deadline, and ``ValueError`` for a
        program that the service does not take."""
        if self._session is None:
            raise RuntimeError("the sandbox is not open: it is used inside `async with`")
        check_program(source, stdin, files, self._limits)
        async with self._free:
            return await self._asked_until_the_deadline(source, stdin, files)

    async def _close(self) -> None:
        self._waiting.close()
        if self._session is not None:
            await self._session.close()

    async def _asked_until_the_deadline(
        self, source: str, stdin: str, files: Mapping[str, str], *, first: bool = False
    ) -> ProgramResult:
        """``first``: a program that has to end by itself. Raises ``WorldGoneError``, ``ValueError``, and before the
        service has run anything ``_RefusedError``."""
        try:
            source.encode()
        except UnicodeEncodeError as error:
            # It is no program anywhere, and what a service makes of it in JSON is not known.
            return ProgramResult("exited", 1, "", f"UnicodeEncodeError: {error}", 0.0, truncated=False)
        try:
            stdin.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{self._name} accepts only UTF-8 on standard input: {error}") from None
        body = self._body_of(source, stdin, files)
        number, loop = next(self._numbers), asyncio.get_running_loop()
        asking = _Asking(loop.time())
        try:
            while True:
                try:
                    result = await self._ask(body, asking)
                    if first and result.outcome != "exited":
                        raise _AwayError(f"{_WORKS} {result.outcome}")
                except _AwayError as away:
                    self._is_away(number, asking, away)
                    await asyncio.sleep(self._pause(asking, away))
                    if asking.suspicious >= _SUSPECT and (found := await self._suspect(body, asking)) is not None:
                        return found
                else:
                    self._has_run = True
                    return result
        finally:
            self._is_back(number)

    def _body_of(self, source: str, stdin: str, files: Mapping[str, str]) -> dict[str, Any]:
        return {
            "code": source,
            "language": "python",
            "stdin": stdin,
            "compile_timeout": self._limits.wall_seconds,
            "run_timeout": self._limits.wall_seconds,
            # Of services since the middle of 2025; others read past it.
            "memory_limit_MB": self._limits.memory_bytes >> 20,
            "files": {name: base64.b64encode(encoded(text)).decode() for name, text in files.items()},
            "fetch_files": [],
        }

    async def _suspect(self, body: Mapping[str, Any], asking: _Asking) -> ProgramResult | None:
        """The program's result after all; None: the service does not run another one either. Raises ``ValueError``
        when it does, and fails with this one once more."""
        asking.suspicious = 0
        try:
            said = await self._ask(self._body_of(_WORKS, "", NO_FILES), asking)
        except _AwayError:
            return None
        if said.stdout != _SAYS:
            return None
        try:
            return await self._ask(body, asking)
        except _AwayError as away:
            if not away.perhaps_its_doing:
                return None
            raise ValueError(
                f"{self._name} failed {asking.tries + 1} times with this program, the last time right after it ran "
                f"another: {away}"
            ) from None

    def _pause(self, asking: _Asking, away: _AwayError) -> float:
        """Seconds until the next try. Raises ``WorldGoneError`` when there is no time for it."""
        left = asking.since + self._seconds - asyncio.get_running_loop().time()
        if left < _LEAST_LEFT:
            raise WorldGoneError(
                f"{self._name} has not run a program within {self._seconds:g} s (deadlineSeconds), tried "
                f"{_times(asking.tries)}: {away}"
            )
        longest = min(_FIRST_PAUSE * 2.0 ** min(asking.tries - 1, 10), _LONGEST_PAUSE)
        # Not all at once; half of what is left is for the try itself.
        return min(max(longest * random.uniform(0.5, 1.0), away.seconds), left / 2)

    def _is_away(self, number: int, asking: _Asking, away: _AwayError) -> None:
        if not asking.tries:
            asking.since = asyncio.get_running_loop().time()
        asking.tries += 1
        asking.suspicious += away.perhaps_its_doing
        asking.problem = str(away)
        first = not self._asking
        self._asking[number] = asking
        if first:
            self._waiting.enter_context(
                self._waits.wait(
                    self._place.removeprefix("spec."), self._reason, until=lambda: self._seconds + self._oldest().since
                )
            )

    def _is_back(self, number: int) -> None:
        if self._asking.pop(number, None) is not None and not self._asking:
            self._waiting.close()

    def _oldest(self) -> _Asking:
        return min(self._asking.values(), key=lambda asking: asking.since)

    def _reason(self) -> str:
        programs = "1 program waiting" if len(self._asking) == 1 else f"{len(self._asking)} programs waiting"
        oldest = self._oldest()
        return f"{self._name}, tried {_times(oldest.tries)} ({oldest.problem}); {programs}"

    async def _ask(self, body: Mapping[str, Any], asking: _Asking) -> ProgramResult:
        assert self._session is not None
        # Programs that it has begun go on when nobody waits for them: a queue is not made shorter by leaving it.
        seconds = self._limits.wall_seconds + _GRACE_SECONDS * 2.0**asking.timeouts
        if asking.tries:
            left = asking.since + self._seconds - asyncio.get_running_loop().time()
            seconds = min(seconds, max(left, self._limits.wall_seconds))
        try:
            async with self._session.post(
                self._url, json=body, allow_redirects=False, timeout=aiohttp.ClientTimeout(total=seconds)
            ) as response:
                status, retry_after = response.status, response.headers.get("Retry-After", "")
                # A character is six in JSON at most (\u0000).
                data, whole = await _body(response, 12 * self._limits.output_bytes + 2**20)
        except aiohttp.InvalidURL as error:
            raise _RefusedError(f"invalid address: {error}") from None
        except aiohttp.ClientConnectorError as error:
            raise _AwayError(f"{type(error).__name__}: {error}") from None
        except TimeoutError:
            asking.timeouts += 1
            raise _AwayError(f"no answer within {seconds:.0f} s", perhaps_its_doing=True) from None
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
            raise _AwayError(f"{type(error).__name__}: {error}", perhaps_its_doing=True) from None
        problem = f"status {status}: {_shown(data)}"
        if status in _OF_THE_PROGRAM:
            raise ValueError(f"{self._name} does not accept this program: {problem}")
        if status in _LATER or status >= 500:
            waits = float(retry_after) if retry_after.isdecimal() else 0.0
            raise _AwayError(problem, perhaps_its_doing=status not in _LATER, seconds=waits)
        try:
            if status != 200:
                raise _RefusedError(problem)
            if not whole:
                return ProgramResult("too much output", _ENDED_BY_FORCE, "", "", 0.0, truncated=True)
            return self._result(data)
        except _RefusedError as error:
            if self._has_run:  # somebody else answers in its place for a while: a proxy, say
                raise _AwayError(str(error)) from None
            raise

    def _result(self, data: bytes) -> ProgramResult:
        try:
            answer = json.loads(data)
            status, ran = answer["status"], answer.get("run_result")
            if status == "SandboxError" or (ran is not None and ran["status"] == "Error"):
                said = _shown(str(answer.get("message") or ran))
                raise _AwayError(f"SandboxError: {said}", perhaps_its_doing=True)
            how, code = ran["status"], ran.get("return_code")
            stdout, stderr = ran.get("stdout") or "", ran.get("stderr") or ""
            seconds = float(ran.get("execution_time") or 0.0)
            stdout, cut = self._cut(stdout)
            stderr, cut_too = self._cut(stderr)
            if how == "TimeLimitExceeded":
                return ProgramResult("timed out", _ENDED_BY_FORCE, stdout, stderr, seconds, cut or cut_too)
            if how != "Finished" or type(code) is not int or status not in ("Success", "Failed"):
                raise ValueError(f"a status {status}, {how} and a return code {code}")
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
            raise _RefusedError(f"its answer is not an answer of run_code ({error!r}): {_shown(data)}") from None
        if cut or cut_too:
            # It would have been ended here for that.
            return ProgramResult("too much output", _ENDED_BY_FORCE, stdout, stderr, seconds, truncated=True)
        return ProgramResult(outcome_of(code, stderr), code, stdout, stderr, seconds, truncated=False)

    def _cut(self, text: str) -> tuple[str, bool]:
        data = encoded(text)
        kept = data[: self._limits.output_bytes]
        return kept.decode(errors="replace"), len(kept) < len(data) or len(data) >= self._gives


async def _body(response: aiohttp.ClientResponse, most: int) -> tuple[bytes, bool]:
    """What it says, and whether that is all: no more than ``most`` bytes are read."""
    data = bytearray()
    async for part in response.content.iter_any():
        data += part
        if len(data) > most:
            return bytes(data), False
    return bytes(data), True


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _shown(said: bytes | str) -> str:
    text = said[: 4 * _SHOWN].decode(errors="replace") if isinstance(said, bytes) else said
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
