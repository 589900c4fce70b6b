#!/usr/bin/env bash
# Makes the guest artefact: kernel, initramfs with agent and crun, modules. Nothing is installed on the host.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
need_root "set-up"
lock

out=$CUBE_ARTEFACTS/guest
parts=$CUBE_CACHE/guest

# The packages, unpacked once.
parts_key=$(key "$tree"/deploy/setup/{lib,guest}.sh)

# extract_kernel FILE writes the kernel proper that is packed in a bzImage. Where it is in there the header says (the
# kernel's Documentation/arch/x86/boot.rst): setup_sects, payload_offset, payload_length.
extract_kernel() {
	local sectors offset length
	sectors=$(od -An -tu1 -j 0x1f1 -N 1 "$1")
	offset=$(od -An -tu4 -j 0x248 -N 4 "$1")
	length=$(od -An -tu4 -j 0x24c -N 4 "$1")
	# The last four bytes, behind the stream, are the unpacked size.
	dd if="$1" bs=1M iflag=skip_bytes,count_bytes skip=$(((sectors + 1) * 512 + offset)) count=$((length - 4)) status=none | xz -dc
}

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
	extract_kernel "$tmp/kernel/boot/vmlinuz-$release" >"$tmp/kernel/boot/vmlinux-$release"
	depmod -b "$tmp/kernel" "$release"
	echo "$release" >"$tmp/release"
	rm -rf "$parts"
	mv "$tmp" "$parts"
}

make_guest() {
	"$tree/bin/cube-artefact" guest --out "$out" --packages "$parts/packages" --kernel "$parts/kernel" --crun "$parts/crun" \
		--release "$(cat "$parts/release")" --agent "$tree/bin/cube-agent"
}

if [ -n "${CUBE_UPDATE:-}" ] || ! fresh guest-parts "$parts_key" || [ ! -e "$parts/release" ]; then
	step "guest kernel and crun" unpack_parts
	stamp guest-parts "$parts_key"
fi
"$tree/deploy/setup/build.sh" ./cmd/cube-agent ./cmd/cube-artefact
# The packer publishes nothing new where the agent hasn't changed.
step "guest image" make_guest
