#!/bin/sh
# Prints the interpreter of the first of these versions that is to be had: `sh requirements/python.sh 3.12 3.11`.
# One counts when it runs: the shim of a version manager may be on the path and refuse. Then pyenv's versions are tried
# themselves, the newest first.
for version in "$@"; do
    named=$(command -v "python$version")
    installed=$(ls -d "$(pyenv root 2>/dev/null)/versions/$version".*/bin/python3 2>/dev/null | sort --version-sort --reverse)
    found=$(printf '%s\n' "$named" "$installed" | while read -r python; do
        if [ -n "$python" ] && "$python" -c '' 2>/dev/null; then echo "$python" && break; fi
    done)
    if [ -n "$found" ]; then echo "$found" && exit 0; fi
done
exit 1
