#!/usr/bin/env bash
# Shows a real image in a microVM, on the running stack (cube up -d).
. "$(dirname "${BASH_SOURCE[0]}")/setup/lib.sh"

image=cube.local/debian:bookworm
archive=$CUBE_CACHE/images/debian-bookworm.tar
socket=${CUBE_CONTAINERD:-/run/cube/containerd.sock}
times=()

# timed WHAT COMMAND…: shows what is run, its output, and notes the time.
timed() {
	local what=$1 start end ms word line=
	shift
	for word in "${@//$tree\//}"; do
		case $word in
		*[!a-zA-Z0-9_./:@=-]*) line+=" ${word@Q}" ;;
		*) line+=" $word" ;;
		esac
	done
	printf '\n# %s\n$%s\n' "$what" "$line"
	start=$EPOCHREALTIME
	"$@" || fail "the demo's step \"$what\" failed (exit $?)"
	end=$EPOCHREALTIME
	ms=$(((${end/[.,]/} - ${start/[.,]/}) / 1000))
	times+=("$(printf '%-58s %4d.%03d s' "$what" $((ms / 1000)) $((ms % 1000)))")
}

printf '\nHost kernel: %s\n' "$(uname -r)"
timed "image import" "$tree/bin/cube" image import "$archive"
timed "first run (boots a machine and saves it, if none is saved)" "$tree/bin/cube" run --rm $image uname -r
timed "second run (restores it)" "$tree/bin/cube" run --rm $image uname -r
timed "Python" "$tree/bin/cube" run --rm $image python3 -c \
	'import platform; print("Python", platform.python_version(), "on Linux", platform.release())'
# shellcheck disable=SC2016 # the guest's shell expands it
timed "the same by containerd's own client" "$tree/bin/ctr" -a "$socket" run --rm --runtime io.cube.v2 \
	--snapshotter cube $image "demo-$$" sh -c 'echo "hello from Linux $(uname -r)"'

printf '\n%s\n\n' "$(printf '%s\n' "${times[@]}")"
cat <<END
The stack goes on running. Try:
  bin/cube run --rm -it $image bash
  bin/ctr -a $socket run --rm -t --runtime io.cube.v2 --snapshotter cube $image box bash
  bin/cube doctor;  bin/cube down
END
