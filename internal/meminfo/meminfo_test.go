package meminfo

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/config"
)

func TestRead(t *testing.T) {
	i, err := Read()
	if err != nil || i.Available < 1<<20 || i.Total < i.Available {
		t.Errorf("this host has %+v, %v", i, err)
	}
	for text, want := range map[string]string{
		"MemTotal: 10 kB\nMemFree: 1 kB\nMemAvailable: 0 kB\n": "",
		"MemFree: 1 kB\n":     "says nothing",
		"MemTotal: much kB\n": "MemTotal",
		"":                    "says nothing",
	} {
		f := filepath.Join(t.TempDir(), "meminfo")
		if err := os.WriteFile(f, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		i, err := read(f)
		if want == "" && (err != nil || i != Info{Total: 10 << 10}) || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%q: %+v, %v", text, i, err)
		}
	}
}

func TestCheck(t *testing.T) {
	a := config.Default().Admission
	a.MemoryHeadroom, a.DisposableMemory = 100<<20, 50<<20
	for _, tc := range []struct {
		available, memory int64
		fits              bool
	}{
		{150 << 20, 1 << 30, true}, {150<<20 - 1, 1 << 30, false}, {149 << 20, 49 << 20, true}, {140 << 20, 49 << 20, false}, {0, 1, false},
	} {
		err := Info{Total: 1 << 40, Available: tc.available}.check(&a, tc.memory)
		if (err == nil) != tc.fits || err != nil && (!errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "memory_headroom = 100MiB")) {
			t.Errorf("%+v: %v", tc, err)
		}
	}
}
