"""Talking to the head pod of a cluster: Ray's dashboard (jobs, leftovers, logs) and the driver's HTTP interface."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, get_args

import aiohttp
from pydantic import ValidationError

from rljob_api.status import DESIRED_PATH, DRIVER_PORT, STATUS_PATH, Desired, DriverStatus, with_free_texts
from rljob_operator import names
from rljob_operator.answers import (
    ANSWER_SECONDS,
    LONGEST_ANSWER,
    AnswerError,
    clean,
    end_of_text,
    last_lines,
    masked,
    read,
    read_end,
    read_json,
)
from rljob_operator.observed import RayJobView, RayState
from rljob_operator.tokens import JobTokens

DEFAULT_ADDRESS = "http://{service}.{namespace}.svc:{port}"
SUBMIT_SECONDS = 30.0
END_OF_LOG = 64 * 1024
LINES = 20
LONGEST_LINE = 200
LONGEST_LIST = 2 * 1024 * 1024
LARGEST_EXIT_CODE = 255
"""As in the status's schema; that of a driver ended by a signal is its number, negative."""
RAY_STATES: tuple[RayState, ...] = get_args(RayState)


class Heads:
    """Addresses of head pods, and one connection pool to all of them.

    Args:
        address: template of a head's address with `{service}`, `{namespace}` and `{port}`; for an operator outside the
            cluster for example the API server's proxy.
    """

    def __init__(self, session: aiohttp.ClientSession, address: str = DEFAULT_ADDRESS) -> None:
        self._session = session
        self._address = address

    def head(self, namespace: str, cluster: str, tokens: JobTokens) -> Head:
        service = names.head_service(cluster)

        def address(port: int) -> str:
            return self._address.format(service=service, namespace=namespace, port=port).rstrip("/")

        return Head(self._session, address(names.DASHBOARD_PORT), address(DRIVER_PORT), tokens)


class Head:
    """One head pod.

    Raises:
        AnswerError: from every method, when the pod doesn't answer in time or not as it should.
    """

    def __init__(self, session: aiohttp.ClientSession, ray: str, driver: str, tokens: JobTokens) -> None:
        self._session = session
        self._ray = ray
        self._driver = driver
        self._tokens = tokens

    async def job(self, submission: str) -> RayJobView | None:
        """Ray's record of a submission; None: there is none."""
        async with self._call("GET", f"{self._ray}/api/jobs/{submission}", self._tokens.ray) as response:
            if response.status == 404:
                return None
            answer = await self._good_json(response, "Ray")
        said = answer.get("status") if isinstance(answer, dict) else None
        state = next((state for state in RAY_STATES if state == said), None)
        if state is None:
            raise AnswerError("Ray's record of the job has an unknown status")
        code = answer.get("driver_exit_code")
        return RayJobView(
            submission=submission,
            state=state,
            # Of a failed driver this quotes the end of its log.
            message=masked(str(answer.get("message") or ""), self._secrets)[:1024],
            exit_code=code if isinstance(code, int) and abs(code) <= LARGEST_EXIT_CODE else None,
        )

    async def submit(
        self, submission: str, entrypoint: str, environment: dict[str, str], metadata: dict[str, str]
    ) -> None:
        """Submits a driver. A submission that Ray knows already is fine: ids are never used for anything else."""
        body = {
            "submission_id": submission,
            "entrypoint": entrypoint,
            "runtime_env": {"env_vars": environment},
            "metadata": metadata,
        }
        url = f"{self._ray}/api/jobs/"
        async with self._call("POST", url, self._tokens.ray, body, seconds=SUBMIT_SECONDS) as response:
            if response.status < 400:
                return
            problem = f"Ray refused the job with {response.status}: {await self._text(response)}"
        if await self.job(submission) is None:
            raise AnswerError(problem)

    async def stop(self, submission: str) -> None:
        """Asks Ray to end a submission; one that is over or unknown is fine."""
        async with self._call("POST", f"{self._ray}/api/jobs/{submission}/stop", self._tokens.ray) as response:
            if response.status >= 400 and response.status != 404:
                raise AnswerError(f"Ray refused to stop the job with {response.status}: {await self._text(response)}")

    async def lines(self, submission: str) -> tuple[str, ...]:
        """The driver's last lines, cleaned and masked, however long its log is."""
        async with self._call("GET", f"{self._ray}/api/jobs/{submission}/logs", self._tokens.ray) as response:
            if response.status >= 400:
                return ()
            end = await read_end(response, END_OF_LOG)
        return last_lines(end_of_text(end), LINES, LONGEST_LINE, self._secrets)

    async def leftovers(self) -> int:
        """Actors and placement groups that are alive."""
        actors = await self._listed("actors", "state", "DEAD")
        groups = await self._listed("placement_groups", "state", "REMOVED")
        return actors + groups

    async def _listed(self, what: str, key: str, unless: str) -> int:
        query = f"limit=1000&filter_keys={key}&filter_predicates=!%3D&filter_values={unless}"
        async with self._call("GET", f"{self._ray}/api/v0/{what}?{query}", self._tokens.ray) as response:
            answer = await self._good_json(response, "Ray", LONGEST_LIST)
        try:
            found = answer["data"]["result"]["result"]
            # Ray's own job supervisor ends a moment after the driver it looked after.
            return sum(1 for item in found if not str(item.get("class_name", "")).endswith("JobSupervisor"))
        except (TypeError, KeyError, AttributeError) as error:
            raise AnswerError(f"Ray's list of {what} has an unknown format") from error

    async def status(self) -> DriverStatus:
        """`GET /v1/status`."""
        async with self._call("GET", self._driver + STATUS_PATH, self._tokens.driver) as response:
            answer = await self._good_json(response, "the driver")
        try:
            # Not its names: the pods to be removed are known by them.
            plain = with_free_texts(answer, lambda text: masked(text, self._secrets))
            return DriverStatus.model_validate(plain)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise AnswerError(f"the driver's status is invalid at {clean(where)[:200]}: {first['msg']}") from error

    async def tell(self, desired: Desired) -> None:
        """`PUT /v1/desired`."""
        body = desired.model_dump(mode="json", by_alias=True, exclude_none=True)
        async with self._call("PUT", self._driver + DESIRED_PATH, self._tokens.driver, body) as response:
            if response.status >= 400:
                raise AnswerError(f"the driver refused with {response.status}: {await self._text(response)}")

    @property
    def _secrets(self) -> tuple[str, ...]:
        return (self._tokens.ray, self._tokens.driver)

    @asynccontextmanager
    async def _call(
        self, method: str, url: str, token: str, body: Any = None, seconds: float = ANSWER_SECONDS
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {"Authorization": f"Bearer {token}"}
        try:
            async with (
                asyncio.timeout(seconds),
                # A pod could redirect the operator, with the token in its hand, to anywhere.
                self._session.request(method, url, json=body, headers=headers, allow_redirects=False) as response,
            ):
                yield response
        except TimeoutError as error:
            raise AnswerError(f"no answer within {seconds:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise AnswerError(f"cannot be reached ({type(error).__name__})") from error

    async def _good_json(self, response: aiohttp.ClientResponse, who: str, limit: int = LONGEST_ANSWER) -> Any:
        if response.status in (401, 403):
            raise AnswerError(f"{who} does not accept the operator's token ({response.status})", refused=True)
        if response.status >= 400 or response.status in range(300, 400):
            raise AnswerError(f"{who} answered {response.status}")
        return await read_json(response, limit)

    async def _text(self, response: aiohttp.ClientResponse) -> str:
        text = (await read(response)).decode(errors="replace")
        return masked(clean(text.strip().splitlines()[-1]), self._secrets)[:300] if text.strip() else ""
