#!/usr/bin/env bash
# Makes the guest artefact: kernel, initramfs with agent and crun, modules. Nothing is installed on the host.
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

make_guest() {
	"$tree/bin/cube-artefact" guest --out "$out" --packages "$parts/packages" --kernel "$parts/kernel" --crun "$parts/crun" \
		--release "$(cat "$parts/release")" --agent "$tree/bin/cube-agent" --envd "$tree/bin/cube-envd"
}

if [ -n "${CUBE_UPDATE:-}" ] || ! fresh guest-parts "$parts_key" || [ ! -e "$parts/release" ]; then
	step "guest kernel and crun" unpack_parts
	stamp guest-parts "$parts_key"
fi
"$tree/deploy/setup/build.sh" ./cmd/cube-agent ./cmd/cube-artefact ./cmd/cube-envd
# The packer publishes nothing new where neither the agent nor envd has changed.
step "guest image" make_guest
