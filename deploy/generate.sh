#!/usr/bin/env bash
# Generates the agent's API from its protocol, and what is read of CRI's. With --check: only tells whether what is committed is what would come out.
. "$(dirname "${BASH_SOURCE[0]}")/setup/lib.sh"
cd "$tree"

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

PATH=$CUBE_CACHE/bin:$PATH
agent=guest-agent/api/agent.proto cri=shim/sandbox/cri/cri.proto
protoc -I. --go_out="$out" --go_opt=paths=source_relative "$agent" "$cri"
protoc -I. --go-ttrpc_out="$out" --go-ttrpc_opt=paths=source_relative "$agent"

for old in $(cd "$out" && find . -name '*.pb.go' -printf '%P\n'); do
	if cmp -s "$out/$old" "$old"; then continue; fi
	[ "${1:-}" != --check ] || fail "$old is not what its protocol gives; run make generate"
	cp "$out/$old" "$old"
	say "  $old"
done
