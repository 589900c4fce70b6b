#!/usr/bin/env bash
# Checks the tree: format, vet, staticcheck, shellcheck, generated code.
. "$(dirname "${BASH_SOURCE[0]}")/setup/lib.sh"
cd "$tree"
export STEP_TAIL=200

# gofmt exits 0 whatever it finds.
formatted() {
	local files
	files=$(gofmt -l .)
	[ -z "$files" ] || { printf 'not formatted (gofmt -w):\n%s\n' "$files"; return 1; }
}

scripts() {
	find .ci deploy integration -type f \( -name '*.sh' -o -path .ci/run -o -path integration/client/testdata/containerd \) -print0 | xargs -0 shellcheck -x
}

step gofmt formatted
step shellcheck scripts
step "go vet" go vet ./...
step staticcheck "$CUBE_CACHE/bin/staticcheck" ./...
step "generated code" deploy/generate.sh --check
