"""What a control plane holds of one kind, kept up to date by a watch: to look at it costs the API server nothing.

A mirror is a moment behind. Who writes and then looks waits for what was written (`wait_for`).
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Object = dict[str, Any]

PAUSE_SECONDS = 0.1
CATCH_UP_SECONDS = 5.0


class Mirror:
    """All objects of a collection. Runs in a thread of its own until closed.

    Args:
        connect: opens a connection to the API server, on which a read may take for ever.
        headers: of each request.
        path: of the collection.
        selector: labels that the objects must have, as in a query.
    """

    def __init__(
        self, connect: Callable[[], http.client.HTTPSConnection], headers: dict[str, str], path: str, selector: str = ""
    ) -> None:
        self._connect = connect
        self._headers = headers
        self._list = f"{path}?labelSelector={selector}"
        self._objects: dict[str, Object] = {}
        """By UID."""
        self._version = 0
        self._changed = threading.Condition()
        self._listeners: set[Callable[[], None]] = set()
        self._closed = False
        threading.Thread(target=self._run, name=f"mirror of {path}", daemon=True).start()

    def objects(self, namespace: str) -> list[Object]:
        """Those of a namespace by name, as the API server lists them. They are shared: to be read only."""
        found = [item for item in self._objects.values() if item["metadata"]["namespace"] == namespace]
        return sorted(found, key=lambda item: str(item["metadata"]["name"]))

    def wait_for(self, written: Object) -> None:
        """Waits until what the API server answered to a write is seen here, or something newer."""
        version = int(written["metadata"]["resourceVersion"])
        with self._changed:
            self._changed.wait_for(lambda: self._version >= version, CATCH_UP_SECONDS)

    @contextmanager
    def listening(self, listener: Callable[[], None]) -> Iterator[None]:
        """Has `listener` called after every change, in the mirror's thread."""
        with self._changed:
            self._listeners.add(listener)
        try:
            yield
        finally:
            with self._changed:
                self._listeners.discard(listener)

    def close(self) -> None:
        """Ends with the next word of the server, or its end."""
        self._closed = True

    def _run(self) -> None:
        pause = threading.Event()
        while not self._closed:
            try:
                self._follow()
            except (http.client.HTTPException, OSError, ValueError):
                # Tests restart the API server.
                pause.wait(PAUSE_SECONDS)

    def _follow(self) -> None:
        connection = self._connect()
        try:
            connection.request("GET", self._list, headers=self._headers)
            response = self._good(connection)
            listed = json.loads(response.read())
            version = listed["metadata"]["resourceVersion"]
            self._note({item["metadata"]["uid"]: item for item in listed["items"]}, int(version))
            connection.request("GET", f"{self._list}&watch=true&resourceVersion={version}", headers=self._headers)
            # A server that has just begun lists, and may refuse the watch a moment later.
            response = self._good(connection)
            while line := response.readline():
                event = json.loads(line)
                if self._closed or event["type"] == "ERROR":
                    return
                item = event["object"]
                objects = {**self._objects, item["metadata"]["uid"]: item}
                if event["type"] == "DELETED":
                    del objects[item["metadata"]["uid"]]
                self._note(objects, int(item["metadata"]["resourceVersion"]))
        finally:
            connection.close()

    @staticmethod
    def _good(connection: http.client.HTTPSConnection) -> http.client.HTTPResponse:
        """The answer to what was asked. Raises ``ConnectionError`` for a refusal, which is tried again."""
        response = connection.getresponse()
        if response.status != 200:
            raise ConnectionError(f"answers {response.status}")
        return response

    def _note(self, objects: dict[str, Object], version: int) -> None:
        with self._changed:
            self._objects, self._version = objects, version
            self._changed.notify_all()
            for listener in self._listeners:
                listener()
