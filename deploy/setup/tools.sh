#!/usr/bin/env bash
# Builds other projects' tools at pinned versions from their Go modules; clang is Debian's.
#   tools.sh run        containerd, ctr, runc, CNI plugins, into bin/
#   tools.sh lint       staticcheck, into the cache
#   tools.sh generate   protoc's plug-ins, bpf2go and clang, into the cache
#   tools.sh client     containerd's client suite, into the cache
#   tools.sh cnitool    CNI's tool that calls plugins, into the cache
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
lock

containerd=v2.4.2
runc=v1.5.2
cni=v1.10.0
cnitool=v1.3.1
staticcheck=v0.8.2
protoc_gen_go=v1.36.12
protoc_gen_go_ttrpc=v1.2.9
protoc_gen_connect_go=v1.21.1
bpf2go=v0.22.0
llvm=19

go_version=$(go env GOVERSION)

# go_install NAME DIR ARGUMENTS…: go install into DIR, unless just that was done before.
go_install() {
	local name=$1 dir=$2 key
	key=$(key "$go_version" "$@")
	shift 2
	if fresh "$name" "$key" && [ -d "$dir" ]; then return; fi
	mkdir -p "$dir"
	(cd / && GOBIN=$dir step "$name" go install "$@")
	stamp "$name" "$key"
}

# copy FROM DIR: puts a file into DIR where it isn't yet. A copy rather than a link: containerd looks for shims beside
# the file that it really is.
copy() {
	local to=$2/${1##*/}
	if cmp -s "$1" "$to"; then return; fi
	mkdir -p "$2"
	cp "$1" "$2/.${1##*/}"
	mv "$2/.${1##*/}" "$to"
}

# client_suite builds containerd's client suite: a test of its module, which go install doesn't do.
client_suite() {
	local dir
	dir=$(cd / && go mod download -json "github.com/containerd/containerd/v2@$containerd" | sed -nE 's/^\t"Dir": "(.*)",?$/\1/p')
	mkdir -p "$CUBE_CACHE/bin"
	cd "$dir"
	go test -c -o "$CUBE_CACHE/tmp/client.test" ./integration/client
	mv "$CUBE_CACHE/tmp/client.test" "$CUBE_CACHE/bin/containerd-client.test"
}

# clang unpacks clang, llvm-strip and the headers of the kernel and libbpf: what compiles the datapath, and nothing that a
# host would have to have installed. The C library stays the host's, which is of the same Debian.
clang() {
	local list=$CUBE_CACHE/tmp/clang.list dir=$CUBE_CACHE/tmp/clang tool
	with_update resolve "clang-$llvm" "llvm-$llvm" libbpf-dev |
		grep -E "^(clang-$llvm|llvm-$llvm|libclang-common-$llvm-dev|libbpf-dev|linux-libc-dev|lib(clang-cpp|llvm)$llvm|lib(bsd|edit|ffi|icu|lzma|md|tinfo|xml|z3-|zstd)[0-9]*|zlib1g) " >"$list"
	with_update fetch "$list"
	unpack "$list" "$dir"
	mkdir "$dir/bin"
	for tool in clang llvm-strip; do
		cat >"$dir/bin/$tool" <<-EOF
			#!/bin/sh
			LD_LIBRARY_PATH=$1/usr/lib/x86_64-linux-gnu:$1/lib/x86_64-linux-gnu exec $1/usr/lib/llvm-$llvm/bin/$tool "\$@"
		EOF
		chmod 755 "$dir/bin/$tool"
	done
	rm -rf "$1"
	mv "$dir" "$1"
	"$1/bin/clang" --version
	"$1/bin/llvm-strip" --version
}

case ${1:-} in
run)
	module=github.com/containerd/containerd/v2/cmd
	go_install "containerd $containerd" "$CUBE_CACHE/bin" \
		"$module/containerd@$containerd" "$module/ctr@$containerd" "$module/containerd-shim-runc-v2@$containerd"
	CGO_ENABLED=1 go_install "runc $runc" "$CUBE_CACHE/bin" \
		-tags 'seccomp netgo osusergo' -ldflags '-linkmode external -extldflags -static' "github.com/opencontainers/runc@$runc"
	plugins=()
	for p in main/bridge main/loopback main/ptp ipam/host-local ipam/static meta/firewall meta/portmap meta/tuning; do
		plugins+=("github.com/containernetworking/plugins/plugins/$p@$cni")
	done
	go_install "CNI plugins $cni" "$CUBE_CACHE/bin/cni" "${plugins[@]}"
	for f in containerd ctr containerd-shim-runc-v2 runc; do copy "$CUBE_CACHE/bin/$f" "$tree/bin"; done
	for f in "$CUBE_CACHE"/bin/cni/*; do copy "$f" "$tree/bin/cni"; done
	;;
lint)
	go_install "staticcheck $staticcheck" "$CUBE_CACHE/bin" "honnef.co/go/tools/cmd/staticcheck@$staticcheck"
	;;
generate)
	go_install "protoc-gen-go $protoc_gen_go" "$CUBE_CACHE/bin" \
		"google.golang.org/protobuf/cmd/protoc-gen-go@$protoc_gen_go"
	go_install "protoc-gen-go-ttrpc $protoc_gen_go_ttrpc" "$CUBE_CACHE/bin" \
		"github.com/containerd/ttrpc/cmd/protoc-gen-go-ttrpc@$protoc_gen_go_ttrpc"
	go_install "protoc-gen-connect-go $protoc_gen_connect_go" "$CUBE_CACHE/bin" \
		"connectrpc.com/connect/cmd/protoc-gen-connect-go@$protoc_gen_connect_go"
	go_install "bpf2go $bpf2go" "$CUBE_CACHE/bin" "github.com/cilium/ebpf/cmd/bpf2go@$bpf2go"
	key=$(key "$llvm" "$CUBE_CACHE" "$(declare -f clang)")
	if [ -z "${CUBE_UPDATE:-}" ] && fresh clang "$key" && [ -x "$CUBE_CACHE/clang/bin/clang" ]; then exit 0; fi
	step "clang $llvm" clang "$CUBE_CACHE/clang"
	stamp clang "$key"
	;;
client)
	key=$(key "$go_version" "$containerd")
	if fresh client "$key" && [ -e "$CUBE_CACHE/bin/containerd-client.test" ]; then exit 0; fi
	step "containerd $containerd's client suite" client_suite
	stamp client "$key"
	;;
cnitool)
	go_install "cnitool $cnitool" "$CUBE_CACHE/bin" "github.com/containernetworking/cni/cnitool@$cnitool"
	;;
*)
	fail "usage: tools.sh run|lint|generate|client|cnitool"
	;;
esac
