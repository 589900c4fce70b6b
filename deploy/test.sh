#!/usr/bin/env bash
# Runs the tests suite by suite and prints the time of each.
#   test.sh unit     all packages but integration
#   test.sh all      unit, then every package below integration as a suite of its own
#   test.sh long     as all, with the race detector for unit and the long form of the others
. "$(dirname "${BASH_SOURCE[0]}")/setup/lib.sh"
cd "$tree"
module=$(go list -m)
failed=0
results=()

# suite NAME GO-TEST-ARGUMENTS…
suite() {
	local name=$1 start=$SECONDS verdict=ok
	shift
	say "suite $name"
	TICK=60 start_ticker "suite $name"
	if ! go test "$@"; then
		verdict=FAILED
		failed=$((failed + 1))
	fi
	stop_ticker
	results+=("$(printf '%-40s %-6s %5d s' "$name" "$verdict" "$((SECONDS - start))")")
}

mapfile -t unit < <(go list ./... | grep -v "^$module/integration")
mapfile -t integration < <(go list -f '{{if .TestGoFiles}}{{.ImportPath}}{{end}}' ./integration/...)

case ${1:-all} in
unit)
	suite unit -timeout 10m "${unit[@]}"
	;;
all)
	suite unit -timeout 10m "${unit[@]}"
	for p in "${integration[@]}"; do suite "${p#"$module/"}" -count=1 -timeout 20m "$p"; done
	;;
long)
	export CUBE_TEST_LONG=1
	CGO_ENABLED=1 suite unit -race -timeout 30m "${unit[@]}"
	for p in "${integration[@]}"; do suite "${p#"$module/"}" -count=1 -timeout 120m "$p"; done
	;;
*)
	fail "usage: test.sh unit|all|long"
	;;
esac

printf '\n%s\n' "$(printf '%s\n' "${results[@]}")"
printf '%d suites in %d s, %d failed\n' "${#results[@]}" "$SECONDS" "$failed"
[ "$failed" -eq 0 ]
