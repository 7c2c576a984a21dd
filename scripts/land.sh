#!/usr/bin/env bash
# What CI will do with HEAD (`make land`): .ci/run, in a clean clone beside this checkout, in the background. It prints where its
# log is; `make land` again says where it stands. The verdict is the last line of the log and of ~/.cache/rljob/land/COMMIT,
# whose first word is green or red.
set -euo pipefail
cd "$(dirname "$0")/.."
commit=$(git rev-parse HEAD)
folder=~/.cache/rljob/land
verdict=$folder/$commit log=$folder/$commit.log clone=$(dirname "$PWD")/land-${commit:0:8}
mkdir -p "$folder"
[ -z "$(git status --porcelain)" ] || echo "land: what is not committed is not tried"
if [ -f "$verdict" ]; then
    cat "$verdict"
elif [ -f "$log" ] && kill -0 "$(cat "$folder/$commit.pid")" 2>/dev/null; then
    echo "under way, see $log: $(grep -aE '^(RLJOB_STAGE|make|\.venv/bin/python -m)' "$log" | tail -1)"
else
    rm -rf "$clone"
    git clone -q . "$clone"
    nohup bash -c '
        cd "$1" && code=0 && { CI=true bash .ci/run < /dev/null || code=$?; } > "$2" 2>&1
        word=green
        [ "$code" -eq 0 ] || word=red
        echo "$word: $3, exit code $code, $SECONDS s; $2" | tee -a "$2" > "$4"
        rm -rf "$1"
    ' land "$clone" "$log" "$commit" "$verdict" > /dev/null 2>&1 &
    echo $! > "$folder/$commit.pid"
    echo "land: $commit in $clone; log $log"
fi
