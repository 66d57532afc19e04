#!/bin/bash
# Resolves every lock again from its .in file, as of the day that the file names. usage: compile.sh UV
set -euo pipefail
uv=$1
cd "$(dirname "$0")"
for source in *.in; do
  name=${source%.in}
  day=$(sed -n 's/^# exclude-newer: //p' "$source")
  extra=()
  if [ -f "$name.override" ]; then extra=(--override "$name.override"); fi
  # universal: one lock for every Python from 3.10 on and every platform that the packages have
  "$uv" pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-annotate \
    --custom-compile-command "make locks" --exclude-newer "$day" "${extra[@]}" "$source" --output-file "$name.txt"
  printf '%-12s %4d packages as of %s\n' "$name" "$(grep -c '^[a-z0-9].*==' "$name.txt")" "$day"
done
