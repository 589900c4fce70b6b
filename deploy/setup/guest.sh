#!/usr/bin/env bash
# Makes the guest artefact: kernel, initramfs with agent and crun, modules. Nothing is installed on the host.
#   guest.sh debian   with the kernel of Debian's package
#   guest.sh small    with the one that kernel.sh builds
#   guest.sh          with that of the two which the artefact in use has; Debian's where there is none
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
need_root "set-up"
lock

out=$CUBE_ARTEFACTS/guest
parts=$CUBE_CACHE/guest

# The packages, unpacked once.
parts_key=$(key "$tree"/deploy/setup/{lib,guest}.sh)

unpack_parts() {
	local tmp=$CUBE_CACHE/tmp/guest release
	mkdir -p "$tmp"
	# Of what the kernel package depends on, only itself is needed here.
	with_update resolve linux-image-amd64 | grep -E '^linux-image-[0-9]' >"$tmp/kernel.list"
	with_update resolve crun | grep -E '^(crun |z?lib)' >"$tmp/crun.list"
	cat "$tmp/kernel.list" "$tmp/crun.list" >"$tmp/packages"
	with_update fetch "$tmp/packages"
	unpack "$tmp/kernel.list" "$tmp/kernel"
	unpack "$tmp/crun.list" "$tmp/crun"
	release=$(basename "$tmp"/kernel/lib/modules/*)
	depmod -b "$tmp/kernel" "$release"
	echo "$release" >"$tmp/release"
	rm -rf "$parts"
	mv "$tmp" "$parts"
}

# in_use: which of the two kernels the artefact in use has.
in_use() {
	if grep -q '^  "kernel": ".*-cube",$' "$out/current/manifest.json" 2>/dev/null; then echo small; else echo debian; fi
}

make_guest() {
	local from=$parts/kernel release=$parts/release list=$parts/packages
	if [ "$kernel" = small ]; then
		from=$CUBE_CACHE/kernel release=$CUBE_CACHE/kernel/release list=$CUBE_CACHE/tmp/packages
		cat "$CUBE_CACHE/kernel/packages" "$parts/crun.list" >"$list"
	fi
	"$tree/bin/cube-artefact" guest --out "$out" --packages "$list" --kernel "$from" --crun "$parts/crun" \
		--release "$(cat "$release")" --agent "$tree/bin/cube-agent" --envd "$tree/bin/cube-envd"
}

kernel=${1:-$(in_use)}
case $kernel in
debian) ;;
small) "$tree/deploy/setup/kernel.sh" ;;
*) fail "usage: guest.sh [debian|small]" ;;
esac

if [ -n "${CUBE_UPDATE:-}" ] || ! fresh guest-parts "$parts_key" || [ ! -e "$parts/release" ]; then
	step "guest kernel and crun" unpack_parts
	stamp guest-parts "$parts_key"
fi
"$tree/deploy/setup/build.sh" ./cmd/cube-agent ./cmd/cube-artefact ./cmd/cube-envd
# The packer publishes nothing new where neither the agent nor envd has changed.
step "guest image" make_guest
