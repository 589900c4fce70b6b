#!/usr/bin/env bash
# Generates the APIs of the agent, the shim and envd from their protocols, and the datapath's objects from its programs. With --check: only tells whether
# what is committed is what would come out.
. "$(dirname "${BASH_SOURCE[0]}")/setup/lib.sh"
cd "$tree"

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

PATH=$CUBE_CACHE/bin:$PATH protoc -I. --go_out="$out" --go_opt=paths=source_relative \
	--go-ttrpc_out="$out" --go-ttrpc_opt=paths=source_relative guest-agent/api/agent.proto shim/api/snapshot.proto
PATH=$CUBE_CACHE/bin:$PATH protoc -I. --go_out="$out" --go_opt=paths=source_relative \
	--connect-go_out="$out" --connect-go_opt=paths=source_relative,package_suffix= \
	guest-agent/envd/api/process/process.proto guest-agent/envd/api/filesystem/filesystem.proto

# Nothing of where the tree and the cache are gets into the objects.
clang=$CUBE_CACHE/clang
mkdir "$out/bpf"
(
	cd bpf
	"$CUBE_CACHE/bin/bpf2go" -go-package bpf -output-dir "$out/bpf" -tags linux -target amd64,arm64 -type action -type reason -type event -type rate -type range \
		-cc "$clang/bin/clang" -strip "$clang/bin/llvm-strip" -cflags "-O2 -g -mcpu=v3 -Wall -Wextra -Werror -Wno-sign-compare" \
		dp dp/dp.c -- -nostdlibinc -isystem "$clang/usr/include" -isystem "$clang/usr/include/x86_64-linux-gnu" \
		-fdebug-prefix-map="$clang=clang"
) >&2

# same SOURCE FILE…: compares with what is in the tree, or puts it there.
same() {
	local source=$1 new old
	shift
	for new in "$@"; do
		old=${new#"$out/"}
		if cmp -s "$new" "$old"; then continue; fi
		[ "$mode" != --check ] || fail "$old is not what $source gives; run make generate"
		cp "$new" "$old"
		say "  $old"
	done
}

mode=${1:-}
same guest-agent/api/agent.proto "$out"/guest-agent/api/*.pb.go
same shim/api/snapshot.proto "$out"/shim/api/*.pb.go
for service in process filesystem; do
	same "guest-agent/envd/api/$service/$service.proto" "$out/guest-agent/envd/api/$service"/*.go
done
same bpf/dp "$out"/bpf/dp_*
