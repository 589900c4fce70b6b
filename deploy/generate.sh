#!/usr/bin/env bash
# Generates the agent's API from its protocol. With --check: only tells whether what is committed is what would come out.
. "$(dirname "${BASH_SOURCE[0]}")/setup/lib.sh"
cd "$tree"

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

PATH=$CUBE_CACHE/bin:$PATH protoc -I. --go_out="$out" --go_opt=paths=source_relative \
	--go-ttrpc_out="$out" --go-ttrpc_opt=paths=source_relative guest-agent/api/agent.proto

for new in "$out"/guest-agent/api/*.pb.go; do
	old=guest-agent/api/${new##*/}
	if cmp -s "$new" "$old"; then continue; fi
	[ "${1:-}" != --check ] || fail "$old is not what guest-agent/api/agent.proto gives; run make generate"
	cp "$new" "$old"
	say "  $old"
done
