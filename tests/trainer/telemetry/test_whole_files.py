"""Files that are replaced in one move, by several threads of one process too."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rljob_trainer.telemetry.run_folder import write_whole


def test_threads_that_replace_the_same_file_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    texts = [str(number) * 50_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for written in [pool.submit(write_whole, path, text) for text in texts * 5]:
            written.result()
    assert path.read_text() in texts
    assert list(tmp_path.iterdir()) == [path]
