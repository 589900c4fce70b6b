#!/usr/bin/env bash
# Starts the stack in the background, unless it runs already.
. "$(dirname "${BASH_SOURCE[0]}")/setup/lib.sh"

if ! "$tree/bin/cube" status >/dev/null 2>&1; then
	exec "$tree/bin/cube" up -d
fi
say "the stack is running already"
for exe in /proc/[0-9]*/exe; do
	if [ "$(readlink "$exe")" = "$tree/bin/cube (deleted)" ]; then
		say "  from an older build; make down up changes to this one"
		break
	fi
done
