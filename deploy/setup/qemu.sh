#!/usr/bin/env bash
# Makes the QEMU artefact from Debian's packages. Nothing is installed on the host.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
need_root "set-up"
lock

out=$CUBE_ARTEFACTS/qemu
key=$(key "$tree"/deploy/setup/{lib,qemu}.sh "$tree"/vmm/artefact/*.go "$out")
if [ -z "${CUBE_UPDATE:-}" ] && fresh qemu "$key" && [ -e "$out/current/manifest.json" ]; then exit 0; fi

make_qemu() {
	local list=$CUBE_CACHE/tmp/qemu.list
	# The parts of QEMU and whatever may be a library.
	with_update resolve qemu-system-x86 | grep -E '^(qemu-system-|seabios |z?lib)' >"$list"
	with_update fetch "$list"
	unpack "$list" "$CUBE_CACHE/tmp/qemu"
	"$tree/bin/cube-artefact" qemu --out "$out" --packages "$list" --root "$CUBE_CACHE/tmp/qemu"
	rm -rf "$CUBE_CACHE/tmp/qemu"
	chroot "$out/current" /usr/bin/qemu-system-x86_64 -version
	chroot "$out/current" /usr/bin/qemu-system-x86_64 -M microvm -accel help
}

"$tree/deploy/setup/build.sh" ./cmd/cube-artefact
step "QEMU" make_qemu
stamp qemu "$key"
