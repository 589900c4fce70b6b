#!/usr/bin/env bash
# Builds Cube's commands (or only those that are named) into bin/.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$tree"
what=${*#./cmd/}
[ $# -gt 0 ] || set -- ./cmd/...
# Without symbol tables: the agent's binary is in every machine's memory.
step "building ${what:-Cube}" go build -ldflags '-s -w' -o bin/ "$@"
