"""Measures what it costs to record the calls of an episode, and to read them back, for three candidates of an episode
log: `dbos` (DBOS Transact on SQLite, as it comes), `dbos-wal` (the same on an engine with a write-ahead log and results
handed over as base64 of raw bytes, on 8 threads), `file` (an append-only file with group commit) and `sqlite` (tables
of our own, write-ahead log, one writer thread, group commit); `none` runs the same programs without a log.

Every candidate runs the same programs: `--episodes` coroutines at once, each of which makes `--calls` calls one after
another; a call waits one millisecond and returns four arrays of `--tokens` tokens, 13 bytes a token. With `--effects`
each call first records an intent and waits until that is durable. Each measurement is a process of its own, which ends
by `os._exit` with all episodes open, as a kill would; a second process reads the record and runs the programs again
over it, and fails if one call is made anew or one byte differs.

    pip install numpy dbos
    python -m benchmarks.episode_log --repeat 3
"""

import argparse
import asyncio
import base64
import hashlib
import json
import os
import queue
import resource
import sqlite3
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path

import numpy as np

FIELDS = (("ids", np.int32), ("log_probs", np.float32), ("versions", np.int32), ("mask", np.uint8))
INTENT, RESULT = 0, 1
THREADS = [0]


POOL = np.random.default_rng(0)
POOL = (
    POOL.integers(0, 150_000, 1 << 20, dtype=np.int32),
    -POOL.random(1 << 20, dtype=np.float32),
    POOL.integers(0, 9, 1 << 20, dtype=np.int32),
    POOL.integers(0, 2, 1 << 20, dtype=np.uint8),
)


def arrays(episode, ordinal, tokens):
    """Returns the result of one call, which is a function of its place alone, so that a replay can be compared."""
    start = (episode * 7919 + ordinal * 104_729) % ((1 << 20) - tokens)
    return tuple(values[start : start + tokens] for values in POOL)


def pack(values):
    return b"".join(value.tobytes() for value in values)


def unpack(data, tokens):
    values, at = [], 0
    for _, dtype in FIELDS:
        values.append(np.frombuffer(data, dtype, tokens, at))
        at += tokens * np.dtype(dtype).itemsize
    return tuple(values)


def digest(arguments):
    return hashlib.sha256(json.dumps(arguments, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:32]


class GroupCommit:
    """One thread that stores lines in batches. It makes them durable at most once a second, or at once while somebody
    waits: all who wait during one synchronisation share the next one."""

    def __init__(self, loop, interval=1.0):
        self.loop, self.interval = loop, interval
        self.queue = queue.SimpleQueue()
        self.syncs = 0
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def put(self, line):
        self.queue.put((line, None))

    def put_and_wait(self, line):
        future = self.loop.create_future()
        self.queue.put((line, future))
        return future

    def run(self):
        self.open()
        last, dirty, waiting = time.monotonic(), False, []
        while True:
            lines = []
            try:
                timeout = max(0.0, last + self.interval - time.monotonic()) if dirty else None
                item = self.queue.get(timeout=timeout)
                while True:
                    if item[0] is not None:
                        lines.append(item[0])
                    if item[1] is not None:
                        waiting.append(item[1])
                    item = self.queue.get_nowait()
            except queue.Empty:
                pass
            if lines:
                self.store(lines)
                dirty = True
            if waiting or (dirty and time.monotonic() - last >= self.interval):
                self.sync()
                self.syncs += 1
                last, dirty = time.monotonic(), False
                done, waiting = waiting, []
                if done:
                    self.loop.call_soon_threadsafe(lambda done=done: [one.set_result(None) for one in done])


class FileLog(GroupCommit):
    HEAD = struct.Struct("<4sIII")

    def __init__(self, folder, loop):
        self.path = folder / "episodes.log"
        super().__init__(loop)

    def open(self):
        self.file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def line(self, key, phase, tokens, body):
        header = json.dumps({"key": key, "phase": phase, "tokens": tokens}, separators=(",", ":")).encode()
        checksum = zlib.crc32(body, zlib.crc32(header))
        return b"".join((self.HEAD.pack(b"EPL1", len(header), len(body), checksum), header, body, b"\n"))

    def store(self, lines):
        data = memoryview(b"".join(lines))
        while data:
            data = data[os.write(self.file, data) :]

    def sync(self):
        os.fdatasync(self.file)

    @classmethod
    def read(cls, folder, data=None):
        data = (folder / "episodes.log").read_bytes() if data is None else data
        view, at = memoryview(data), 0
        while at + cls.HEAD.size <= len(data):
            magic, header, body, checksum = cls.HEAD.unpack_from(data, at)
            start, middle, end = at + cls.HEAD.size, at + cls.HEAD.size + header, at + cls.HEAD.size + header + body
            if magic != b"EPL1" or end + 1 > len(data) or zlib.crc32(view[start:end]) != checksum:
                return
            head = json.loads(bytes(view[start:middle]))
            yield head["key"], head["phase"], head["tokens"], view[middle:end]
            at = end + 1


class SqliteLog(GroupCommit):
    def __init__(self, folder, loop):
        self.path = folder / "episodes.sqlite"
        super().__init__(loop)

    def open(self):
        self.db = sqlite3.connect(self.path, isolation_level=None)
        self.db.execute("PRAGMA journal_mode=WAL")
        self.db.execute("PRAGMA synchronous=FULL")
        self.db.execute(
            "CREATE TABLE calls (episode TEXT, ordinal INT, phase INT, kind TEXT, digest TEXT, tokens INT, body BLOB,"
            " PRIMARY KEY (episode, ordinal, phase))"
        )
        self.pending = []

    def line(self, key, phase, tokens, body):
        return (key[0], key[1], phase, key[2], key[3], tokens, body)

    def store(self, lines):
        self.pending += lines

    def sync(self):
        self.db.execute("BEGIN IMMEDIATE")
        self.db.executemany("INSERT INTO calls VALUES (?,?,?,?,?,?,?)", self.pending)
        self.db.execute("COMMIT")
        self.pending = []

    @classmethod
    def read(cls, folder):
        db = sqlite3.connect(folder / "episodes.sqlite")
        rows = db.execute("SELECT episode, ordinal, kind, digest, phase, tokens, body FROM calls ORDER BY rowid")
        for episode, ordinal, kind, arguments, phase, tokens, body in rows:
            yield [episode, ordinal, kind, arguments], phase, tokens, body


class NoLog:
    def __init__(self, folder, loop):
        pass

    def line(self, key, phase, tokens, body):
        return None

    def put(self, line):
        pass

    async def put_and_wait(self, line):
        pass


LOGS = {"file": FileLog, "sqlite": SqliteLog, "none": NoLog}


async def episode_with_log(log, number, options, recorded, waits):
    """One episode over a log of ours: takes what is recorded for its key, else makes the call and records it."""
    for ordinal in range(options.calls):
        arguments = {"episode": number, "turn": ordinal, "prompt": "x" * 200}
        key = [f"episode-{number}", ordinal, "generate", digest(arguments)]
        found = recorded.get((key[0], ordinal)) if recorded is not None else None
        if found is not None:
            assert found[0] == key, "the program or an argument changed"
            result = unpack(found[2], found[1])
            assert pack(result) == pack(arrays(number, ordinal, options.tokens))
            continue
        assert recorded is None, "a recorded call is made anew"
        if options.effects:
            begun = time.perf_counter()
            await log.put_and_wait(log.line(key, INTENT, 0, b""))
            waits.append(time.perf_counter() - begun)
        await asyncio.sleep(0.001)
        result = arrays(number, ordinal, options.tokens)
        if options.candidate != "none":
            log.put(log.line(key, RESULT, options.tokens, pack(result)))


async def lag(delays):
    while True:
        begun = time.perf_counter()
        await asyncio.sleep(0.005)
        delays.append(time.perf_counter() - begun - 0.005)
        THREADS[0] = max(THREADS[0], threading.active_count())


def size(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


async def ours(options, folder):
    loop = asyncio.get_running_loop()
    if options.phase == "read":
        begun = time.perf_counter()
        recorded = {}
        for key, phase, tokens, body in LOGS[options.candidate].read(folder):
            if phase == RESULT:
                recorded[key[0], key[1]] = key, tokens, body
        read = time.perf_counter() - begun
        assert len(recorded) == options.episodes * options.calls
        if options.candidate == "file":
            data = (folder / "episodes.log").read_bytes()[:-1]
            whole = options.episodes * options.calls * (2 if options.effects else 1)
            assert sum(1 for _ in FileLog.read(folder, data)) == whole - 1, "a torn tail is cut, the rest is kept"
        begun = time.perf_counter()
        await asyncio.gather(*(episode_with_log(None, n, options, recorded, []) for n in range(options.episodes)))
        return {"read_s": read, "replay_s": read + time.perf_counter() - begun}
    log, waits, delays = LOGS[options.candidate](folder, loop), [], []
    monitor = asyncio.create_task(lag(delays))
    await asyncio.sleep(0.05)
    delays.clear()
    begun, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(episode_with_log(log, n, options, None, waits) for n in range(options.episodes)))
    await log.put_and_wait(None)
    wall, cpu = time.perf_counter() - begun, time.process_time() - cpu
    monitor.cancel()
    return report(options, wall, cpu, delays, waits, folder, getattr(log, "syncs", 0))


def report(options, wall, cpu, delays, waits, folder, syncs):
    count = options.episodes * options.calls
    delays, waits = sorted(delays) or [0.0], sorted(waits) or [0.0]
    return {
        "cpu_us": cpu / count * 1e6,
        "wall_us": wall / count * 1e6,
        "bytes": size(folder) / count,
        "lag_p99_ms": delays[int(len(delays) * 0.99)] * 1e3,
        "lag_max_ms": delays[-1] * 1e3,
        "intent_p50_ms": statistics.median(waits) * 1e3,
        "intent_max_ms": waits[-1] * 1e3,
        "syncs": syncs,
        "threads": THREADS[0],
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


async def with_dbos(options, folder):
    import sqlalchemy
    from dbos import DBOS
    from dbos._serialization import Serializer

    class Raw(Serializer):
        """Base64 of the arrays' bytes: the least that a serializer which must return text can do."""

        def serialize(self, data):
            if isinstance(data, tuple) and data and isinstance(data[0], np.ndarray):
                return "a" + base64.b64encode(pack(data)).decode()
            return "j" + json.dumps(data)

        def deserialize(self, text):
            if text[0] == "a":
                data = base64.b64decode(text[1:])
                return unpack(data, len(data) // 13)
            return json.loads(text[1:])

        def name(self):
            return "raw"

    url = f"sqlite:///{folder}/dbos.sqlite"
    config = {"name": "bench", "system_database_url": url, "application_version": "1", "log_level": "ERROR"}
    if options.candidate == "dbos-wal":
        engine = sqlalchemy.create_engine(url, pool_size=20)

        @sqlalchemy.event.listens_for(engine, "connect")
        def wal(connection, _):
            connection.isolation_level = "IMMEDIATE"
            for pragma in ("busy_timeout=30000", "foreign_keys=ON", "journal_mode=WAL", "synchronous=NORMAL"):
                connection.execute(f"PRAGMA {pragma}")

        config |= {"system_database_engine": engine, "serializer": Raw(), "max_executor_threads": 8}
    DBOS(config=config)
    made, arrived, waits, delays = [0], [0], [], []
    everyone, never = asyncio.Event(), asyncio.Event()

    @DBOS.step()
    async def intend(number, ordinal):
        return None

    @DBOS.step()
    async def generate(number, ordinal, prompt):
        made[0] += 1
        await asyncio.sleep(0.001)
        return arrays(number, ordinal, options.tokens)

    @DBOS.workflow()
    async def episode(number):
        for ordinal in range(options.calls):
            if options.effects:
                begun = time.perf_counter()
                await intend(number, ordinal)
                waits.append(time.perf_counter() - begun)
            result = await generate(number, ordinal, "x" * 200)
            if options.phase == "read":
                assert pack(result) == pack(arrays(number, ordinal, options.tokens))
        arrived[0] += 1
        if arrived[0] == options.episodes:
            everyone.set()
        await never.wait()

    if options.phase == "read":
        begun = time.perf_counter()
        DBOS.launch()
        launched = time.perf_counter() - begun
        await everyone.wait()
        assert made[0] == 0, "a recorded call is made anew"
        return {"read_s": float("nan"), "launch_s": launched, "replay_s": time.perf_counter() - begun}
    DBOS.launch()
    monitor = asyncio.create_task(lag(delays))
    await asyncio.sleep(0.05)
    delays.clear()
    begun, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(DBOS.start_workflow_async(episode, n) for n in range(options.episodes)))
    await everyone.wait()
    wall, cpu = time.perf_counter() - begun, time.process_time() - cpu
    monitor.cancel()
    return report(options, wall, cpu, delays, waits, folder, 0)


def child(options):
    folder = Path(options.folder)
    run = with_dbos if options.candidate.startswith("dbos") else ours
    result = asyncio.run(ended_by_kill(run(options, folder)))
    return result


async def ended_by_kill(work):
    print(json.dumps(await work), flush=True)
    os._exit(0)


def measure(options, candidate, effects):
    runs = []
    for _ in range(options.repeat):
        with tempfile.TemporaryDirectory() as folder:
            result = {}
            for phase in ("write", "read") if candidate != "none" else ("write",):
                command = [sys.executable, __file__, "--candidate", candidate, "--phase", phase, "--folder", folder]
                for name in ("episodes", "calls", "tokens"):
                    command += [f"--{name}", str(getattr(options, name))]
                command += ["--effects"] if effects else []
                done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
                if not done.stdout.strip():
                    raise SystemExit(done.stderr)
                result |= json.loads(done.stdout.strip().splitlines()[-1])
            runs.append(result)
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidate", nargs="*", default=["none", "file", "sqlite", "dbos", "dbos-wal"])
    parser.add_argument("--phase")
    parser.add_argument("--folder")
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=770)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--effects", action="store_true")
    options = parser.parse_args()
    if options.phase:
        options.candidate = options.candidate[0]
        return child(options)
    for candidate in options.candidate:
        result = measure(options, candidate, options.effects)
        figures = (f"{name}={value:.3g}" if value < 100 else f"{name}={value:.0f}" for name, value in result.items())
        print(candidate, " ".join(figures), flush=True)


if __name__ == "__main__":
    main()
