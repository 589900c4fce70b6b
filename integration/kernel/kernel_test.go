// Package kernel runs the network packages' own tests on the kernel that Debian 12 comes with, which is too old for TCX: the
// guest image's kernel in an emulated QEMU, with the tests for its init's only work.
package kernel

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/vmm/artefact"
)

var (
	// sample is what tells most in a short time: the verifier, a program on many frames, hooks attached, replaced and detached
	// under traffic, checksums and large segments, the wait for programs, the host's rules and routes, a tap's way from one
	// sandbox to another.
	sample = []suite{
		{"bpf", "^(TestBestWay|TestFromGuest|TestTraffic|TestForwarded|TestWaitPrograms|TestRemoveHalf)$"},
		{"cni/gateway", "^TestUpDown$"},
		{"cni/network", "^TestInherit$"},
	}
	all = []suite{{"bpf", "."}, {"cni/gateway", "."}, {"cni/network", "."}, {"cni/dns", "."}}
)

// needsTCX tells of the tests that this kernel is too old for.
func needsTCX(test string) bool { return strings.HasSuffix(test, "/TCX") || test == "TestOtherWay" }

// TestDebianKernel: nothing fails there, and nothing is skipped but what takes TCX, with subtests counted.
func TestDebianKernel(t *testing.T) {
	cfg, err := config.Load("")
	must(t, err)
	if artefacts := os.Getenv("CUBE_ARTEFACTS"); artefacts != "" {
		cfg.Artefacts = artefacts
	}
	for _, dir := range []string{cfg.QEMUDir(), cfg.GuestDir()} {
		if _, err := os.Stat(dir); err != nil {
			t.Skipf("SKIPPED: no artefact: %v (make build)", err)
		}
	}
	m, err := artefact.ReadManifest(filepath.Clean(cfg.GuestDir()))
	must(t, err)
	if !slices.ContainsFunc(slices.Collect(maps.Keys(m.Packages)), func(p string) bool { return strings.HasPrefix(p, "linux-image-") }) {
		t.Skipf("SKIPPED: the guest image has %s, not Debian's kernel (deploy/setup/guest.sh debian)", m.Kernel)
	}

	suites, least, limit := sample, 55, 10*time.Minute
	if os.Getenv("CUBE_TEST_LONG") != "" {
		suites, least, limit = all, 250, time.Hour
	}
	began := time.Now()
	console := run(t, cfg, limit, suites)
	r := read(console)
	t.Logf("kernel %s: %d tests have passed in %v, skipped: %v", r.kernel, len(r.passed), time.Since(began).Round(time.Second), r.skipped)
	faults := r.faults(least, needsTCX)
	if r.kernel != m.Kernel {
		faults = append(faults, "it ran kernel "+r.kernel+", not "+m.Kernel)
	}
	if !strings.Contains(console, "programs are attached by clsact\n") {
		faults = append(faults, "the programs were not attached by clsact")
	}
	if !strings.Contains(console, "without ticks: processor 1\n") {
		faults = append(faults, "the second processor has ticks")
	}
	if len(faults) > 0 {
		t.Errorf("%s\n\nthe console:\n%s", strings.Join(faults, "\n"), console)
	}
}
