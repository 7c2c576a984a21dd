"""``python -m benchmarks.kills --moments 200``: kills at random moments over all modes, and a line for each run.

Sync must train the same groups in the same steps as an untouched run. The other modes must have lost nothing, done
nothing twice, and kept the bound on age.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

from benchmarks.kills.runs import MODES, VICTIMS, KilledRunError, Victim, check, run_to_the_end


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.kills", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--moments", type=int, default=200, help="kills in all (default: 200)")
    parser.add_argument("--chain", type=int, default=4, help="kills in one run (default: 4)")
    parser.add_argument("--mode", choices=MODES, action="append", help="only these pipelines")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, done, failed, number = random.Random(args.seed), 0, 0, 0
    modes = args.mode or list(MODES)
    with tempfile.TemporaryDirectory(prefix="rljob-kills-") as scratch:
        whole = {}
        if "sync" in modes:
            run_to_the_end("sync", Path(scratch, "whole"), [], seed=0)
            whole = check(Path(scratch, "whole", "output"), "sync")
        while done < args.moments:
            mode = modes[number % len(modes)]
            victims: list[Victim] = [rng.choice(VICTIMS) for _ in range(min(args.chain, args.moments - done))]
            folder, killed = Path(scratch, f"run-{number}"), len(victims)
            try:
                story = run_to_the_end(mode, folder, victims, seed=rng.randrange(1 << 30))
                killed = len(story.kills)  # a run may end before its last
                states = check(folder / "output", mode)
                if mode == "sync" and states != whole:
                    raise KilledRunError("the ledger differs from that of an untouched run")
                print(
                    f"{mode}: {', '.join(story.kills)}; {story.rolled_back} steps done again: nothing lost", flush=True
                )
            except KilledRunError as error:
                failed += 1
                print(f"{mode}: {victims}: FAILED: {error}", flush=True)
            done, number = done + killed, number + 1
    print(f"{done} kills in {number} runs, {failed} runs failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
