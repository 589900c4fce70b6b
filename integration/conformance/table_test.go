package conformance

import (
	"os"
	"testing"
)

// row is one thing that a shim has to do.
type row struct {
	name string
	test func(*box)
	// shared rows run in one container that they have in common, and leave running; the others get one that isn't
	// started yet.
	shared bool
	// noFake and noQEMU say why a side can't have the row.
	noFake, noQEMU string
	// long rows run with QEMU only in the long form of the tests, for their time.
	long bool
}

// group is a part of the table.
type group struct {
	name string
	rows []row
}

var table = []group{
	{"Binary", binaryRows},
	{"Run", runRows},
	{"Exec", execRows},
	{"Task", taskRows},
	{"OOM", oomRows},
	{"Layers", layersRows},
	{"Mounts", mountRows},
	{"Network", networkRows},
	{"Pod", podRows},
	{"Sandbox", sandboxRows},
	{"Crash", crashRows},
	{"Stress", stressRows},
	{"Other", otherRows},
}

func runTable(t *testing.T, d *daemon) {
	if !d.fake() {
		for _, dir := range []string{d.cfg.QEMUDir(), d.cfg.GuestDir()} {
			if _, err := os.Stat(dir); err != nil {
				t.Skipf("no artefact: %v (make setup)", err)
			}
		}
	}
	var shared *box
	common := func() *box {
		if shared == nil {
			shared = d.sized(t, sharedMiB)
			if d.host != nil {
				shared.change = onNetwork
			}
			shared.run(sleep)
		}
		return shared
	}
	for _, g := range table {
		t.Run(g.name, func(t *testing.T) {
			for _, r := range g.rows {
				t.Run(r.name, func(t *testing.T) {
					if why := r.skip(d); why != "" {
						t.Skip(why)
					}
					if r.shared {
						r.test(common().in(t))
					} else {
						r.test(d.box(t))
					}
				})
			}
		})
	}
	if len(d.events.strange) > 0 {
		t.Errorf("events that containerd doesn't know: %q", d.events.strange)
	}
}

// skip is why the row doesn't run here.
func (r row) skip(d *daemon) string {
	switch {
	case d.fake():
		return r.noFake
	case r.noQEMU != "":
		return r.noQEMU
	case r.long && os.Getenv("CUBE_TEST_LONG") == "":
		return "takes long with QEMU: set CUBE_TEST_LONG=1"
	}
	return ""
}
