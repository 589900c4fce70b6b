#!/usr/bin/env bash
# Builds Cube's commands (or only those that are named) into bin/.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$tree"
[ $# -gt 0 ] || set -- ./cmd/...
step "building ${*#./cmd/}" go build -o bin/ "$@"
