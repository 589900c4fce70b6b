package admission

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/cubesandbox/cube/internal/config"
)

// TestRead reads this host.
func TestRead(t *testing.T) {
	cfg := config.Default()
	cfg.StateDir = t.TempDir()
	if err := os.Mkdir(cfg.StoreDir(), 0o700); err != nil {
		t.Fatal(err)
	}
	p := NewProc(cfg)
	r, err := p.Read()
	if err != nil || r.CPUs < 1 || r.MemoryAvailable < 1<<20 || r.MemoryTotal < r.MemoryAvailable || r.DiskTotal < 1<<20 || r.DiskFree > r.DiskTotal {
		t.Errorf("%+v, %v", r, err)
	}
	if used, err := p.CPUUsed(); err != nil || used < 0 || used > float64(r.CPUs) {
		t.Errorf("%v CPUs are busy, %v", used, err)
	}
}

func TestPressure(t *testing.T) {
	p := &Proc{dir: t.TempDir()}
	if got, err := p.pressure(); err != nil || got != (Pressure{}) {
		t.Errorf("a kernel that doesn't tell: %+v, %v", got, err)
	}
	write := func(name, text string) {
		t.Helper()
		f := filepath.Join(p.dir, "pressure", name)
		if err := os.MkdirAll(filepath.Dir(f), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(f, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("cpu", "some avg10=37.54 avg60=39.20 avg300=28.29 total=35088910972\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n")
	write("memory", "some avg10=0.00 avg60=0.00 avg300=0.00 total=32871636\nfull avg10=9.00 avg60=0.00 avg300=0.00 total=8157837\n")
	write("io", "some avg10=4.90 avg60=5.61 avg300=4.68 total=3705175028\nfull avg10=2.46 avg60=2.65 avg300=2.46 total=938561674\n")
	if got, err := p.pressure(); err != nil || got != (Pressure{CPU: 37.54, IO: 4.9, Known: true}) {
		t.Errorf("%+v, %v", got, err)
	}
	for _, bad := range []string{"", "full avg10=1.00 avg60=0.00", "some avg10=x avg60=0", "some avg10=NaN avg60=0", "some avg10=101 avg60=0", "some avg10=-1 avg60=0"} {
		write("cpu", bad)
		if _, err := p.pressure(); err == nil {
			t.Errorf("%q is taken for a pressure", bad)
		}
	}
}

func TestParseStat(t *testing.T) {
	s, err := parseStat("cpu  10 20 30 1000 500 1 2 3 7 8\ncpu0 1 2 3\n")
	if err != nil || s.busy != 66 || s.total != 1566 || time.Since(s.at) > time.Minute {
		t.Errorf("%+v, %v", s, err)
	}
	for _, bad := range []string{"", "cpu 1 2 3", "cpu0 1 2 3 4 5 6 7 8", "cpu 1 2 3 4 5 6 7 x"} {
		if _, err := parseStat(bad); err == nil {
			t.Errorf("%q is taken for times", bad)
		}
	}
}
